"""The options of a coordinator: `swarm-ft coordinator` and `swarm_ft.coordinate` follow from them.

So does their reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from swarm_ft.api.connections import DHT_PREFIX, check_local_nodes
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.shared_options import DhtPrefix, InitialPeers, Insecure, Snapshots
from swarm_ft.api.swarm_keys import JOURNAL, keys_folder
from swarm_ft.coordinator.facts.quotas import Quotas
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import NumBytes, Option, check

KEEPERS = 2
"""Default number of keepers. So many machines beside a stage's own may die at once."""
MAX_KEEPERS = 16
MEMORY_JOURNAL = Path(":memory:")
"""SQLite's name of a database without a file."""
Hours = Annotated[float, Range(0.0, is_open=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorOptions:
    """The options of a coordinator.

    Raises:
        BadOption: A value is out of its bounds, or two options contradict each other.
    """

    initial_peers: InitialPeers = ()
    dht_prefix: DhtPrefix = DHT_PREFIX
    listening: ListenOptions = field(default_factory=ListenOptions)
    journal: Annotated[
        Path,
        Option(
            "SQLite database of all runs; their data lies beside it in FILE.tokens. A coordinator "
            "that starts with the same journal continues its runs.",
            metavar="FILE",
        ),
    ] = Path(JOURNAL)
    queue_hours: Annotated[
        Hours,
        Option(
            "Hours that a job waits for peers that can host it. Other jobs may start meanwhile.",
            metavar="HOURS",
        ),
    ] = 24.0
    result_hours: Annotated[
        Hours,
        Option("Hours that peers keep a finished run's result for its client.", metavar="HOURS"),
    ] = 168.0
    quotas: Quotas = field(default_factory=Quotas)
    recording_bytes: Annotated[
        NumBytes,
        Option(
            "Disk for the recording that 'swarm-ft replay' reads, beside the journal in "
            "FILE.recording. The oldest part is deleted first; 0 records nothing.",
            name="recording-size",
        ),
    ] = 256 << 20
    snapshots: Snapshots = None
    keepers: Annotated[
        Annotated[int, Range(0, MAX_KEEPERS)] | None,
        Option(
            "Number of peers that store encrypted snapshots of each stage, beside the stage's own "
            "peers; 0 for none.",
            metavar="N",
            default=f"{KEEPERS} without --snapshots",
        ),
    ] = None
    moves_layers: Annotated[
        bool,
        Option(
            "Repartition a running pipeline over a snapshot, if that makes steps much faster.",
            name="moves",
        ),
    ] = True
    insecure: Insecure = False
    is_public: Annotated[
        bool,
        Option(
            "Let anybody join, as a replica on probation: such a peer hosts only stages that "
            "another peer hosts too, and never the first or the last one. Prints the public "
            "invitation.",
            name="open",
            has_no=False,
        ),
    ] = False
    has_relay: Annotated[
        bool,
        Option(
            "Relay links between members that cannot reach each other, on the coordinator's port.",
            name="relay",
        ),
    ] = True
    encrypt_at_rest: Annotated[
        Path | None,
        Option(
            "Encrypt tokens and the journal's job data with the key in this file, created at the "
            "first start. Keep it away from the journal: both together reveal everything.",
            metavar="FILE",
        ),
    ] = None
    page: Annotated[
        str | None,
        Option(
            "Address of the web page, which shows and steers all runs. On addresses of other "
            "machines, such as 0.0.0.0:7770, it uses TLS with the swarm's own certificate.",
            metavar="HOST:PORT",
            default="127.0.0.1:7770, or any free port",
        ),
    ] = None
    no_page: Annotated[bool, Option("Serve no web page.", has_no=False)] = False
    metrics: Annotated[
        str | None,
        Option(
            "Address that serves /metrics, /healthz and /readyz to anybody, in plaintext.",
            metavar="HOST:PORT",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        if self.page and self.no_page:
            raise BadOption("--page, --no-page: expected one of the two, got both")
        if self.keepers and self.snapshots:
            raise BadOption("--keepers, --snapshots: expected one of the two, got both")
        if self.is_public and self.insecure:
            raise BadOption(
                "--open: expected a swarm with keys, since anybody may join one without; create "
                "keys with 'swarm-ft init'"
            )

    @property
    def keys(self) -> Path:
        """The folder of the swarm's keys, which may not exist."""
        return keys_folder(str(self.journal))

    @property
    def num_keepers(self) -> int:
        """The number of peers that store each stage of a snapshot."""
        default = 0 if self.snapshots else KEEPERS
        return default if self.keepers is None else self.keepers

    @property
    def nodes(self) -> tuple[str, ...]:
        """The addresses of DHT nodes, with those in files.

        Raises:
            BadOption: A file cannot be read, or has no addresses.
        """
        from swarm_ft.discovery import expand_initial_peers

        return expand_initial_peers(self.initial_peers)


def check_swarm(options: CoordinatorOptions) -> None:
    """Check the options against the swarm's files, without slow imports.

    A coordinator without keys and without a journal is a new swarm, and its start creates the keys.
    A journal without keys is another matter: with new ones no member of that swarm could return.

    Raises:
        BadOption: The swarm lacks its keys, or has keys despite `--insecure`; or an address is not
            on this machine, with `--insecure`.
    """
    folder, journal = options.keys, options.journal
    nodes = options.nodes
    if options.insecure:
        if folder.exists():
            raise BadOption(
                f"--insecure: expected a swarm without keys, got keys in {folder}; leave the "
                "option out"
            )
        options.listening.check_local()
        check_local_nodes(nodes)
    elif journal.exists() and not folder.exists():
        named = "" if journal == Path(JOURNAL) else f" --journal {journal}"
        raise BadOption(
            f"{folder}: expected the keys of the swarm of {journal}, got none; restore them from a "
            f"copy, create new ones with 'swarm-ft init{named}', or use --insecure for plaintext "
            "on this machine only"
        )
