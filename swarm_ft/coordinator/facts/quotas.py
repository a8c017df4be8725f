"""How much clients may ask of a coordinator: one decision for each job, before its data come. Pure.

A client is who its key says; where links are not encrypted all clients are the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm_ft.coordinator.facts.state import Run
from swarm_ft.errors import BadDataset, Busy, OverQuota
from swarm_ft.protocol.messages.client import RunPhase

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Upload:
    """A job whose data are coming in.

    Attributes:
        owner: the client that submits it.
        num_bytes: of all its tokens.
    """

    owner: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Quotas:
    """See the module's docstring.

    Attributes:
        queued: jobs of one client that have no peers yet.
        jobs: of all clients, that are not over.
        job_bytes: of one job's tokens.
        client_bytes: of the tokens of all of a client's jobs that are kept here.
        total_bytes: of all clients' tokens.
        bytes_per_s: the least that a job must come in with.
    """

    queued: int = 4
    jobs: int = 64
    job_bytes: int = GIB
    client_bytes: int = 4 * GIB
    total_bytes: int = 32 * GIB
    bytes_per_s: float = 16 << 10

    def check(
        self, runs: Iterable[Run], uploads: Collection[Upload], job: Upload, who: str
    ) -> None:
        """Whether a job may come in.

        Args:
            runs: that are known, over or not.
            uploads: others that are coming in.
            job: the new one.
            who: its client, in words.

        Raises:
            BadDataset: it is larger than any job may be.
            OverQuota: its client has as much as it may have.
            Busy: all clients together have.
        """
        kept = [Upload(run.owner, run.spec.train.data_bytes) for run in _with_data(runs)]
        going = [run for run in runs if not run.phase.is_over]
        self._check_client(going, kept, uploads, job, who)
        if len(going) + len(uploads) >= self.jobs:
            raise Busy(f"{self.jobs} jobs are waiting or under way; try again when some are over")
        held = sum(one.num_bytes for one in (*kept, *uploads))
        if held + job.num_bytes > self.total_bytes:
            raise Busy(
                f"the tokens of all jobs here take {_size(held)} of {_size(self.total_bytes)}; try "
                "again when some are over"
            )

    def _check_client(
        self,
        going: Iterable[Run],
        kept: Iterable[Upload],
        uploads: Collection[Upload],
        job: Upload,
        who: str,
    ) -> None:
        if job.num_bytes > self.job_bytes:
            raise BadDataset(
                f"data: {job.num_bytes} bytes of tokens, {self.job_bytes} are allowed in a job; "
                "cut the text, or let the coordinator's owner raise --max-job-size"
            )
        own_uploads = [one for one in uploads if one.owner == job.owner]
        queued = [r for r in going if r.owner == job.owner and not r.attempt.assignments]
        if len(queued) + len(own_uploads) >= self.queued:
            raise OverQuota(
                f"{len(queued)} jobs of {who} are queued, {self.queued} are allowed; wait until "
                "one begins, or cancel one"
            )
        held = sum(one.num_bytes for one in (*kept, *own_uploads) if one.owner == job.owner)
        if held + job.num_bytes > self.client_bytes:
            raise OverQuota(
                f"the jobs of {who} keep {_size(held)} of tokens here, {_size(self.client_bytes)} "
                f"are allowed, and this one has {_size(job.num_bytes)}; collect or cancel one"
            )


def _with_data(runs: Iterable[Run]) -> Iterable[Run]:
    """Those whose tokens are kept: a result that is lost is made again from them."""
    return (run for run in runs if run.phase <= RunPhase.FINISHED)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
