"""Quotas of clients, checked for each job before its data arrive. Pure.

A client's key identifies it; where links are not encrypted all clients count as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from swarm_ft.errors import BadDataset, Busy, OverQuota
from swarm_ft.protocol.spec import options
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import NumBytes, Option

if TYPE_CHECKING:
    from swarm_ft.coordinator.facts.state import Run  # Slow, and every `--help` reads the options.

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Upload:
    """A job whose data are arriving.

    Attributes:
        owner: Client that submits the job.
        num_bytes: Bytes of all its tokens.
    """

    owner: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Quotas:
    """Limits on jobs and their tokens.

    Attributes:
        queued: Jobs of one client that have no peers yet.
        jobs: Jobs of all clients that are not over.
        job_bytes: Bytes of one job's tokens.
        client_bytes: Bytes of the stored tokens of one client's jobs.
        total_bytes: Bytes of all clients' tokens.
        bytes_per_s: Least rate at which a job must arrive.

    Raises:
        BadOption: A limit is out of its bounds.
    """

    queued: Annotated[
        int,
        Range(1),
        Option(
            "Maximum number of queued jobs per client.", name="max-queued-per-client", metavar="N"
        ),
    ] = 4
    jobs: int = 64
    job_bytes: Annotated[
        NumBytes,
        Option("Maximum size of one job's token ids, 4 bytes each.", name="max-job-size"),
    ] = GIB
    client_bytes: Annotated[
        NumBytes,
        Option(
            "Maximum size of the token ids of one client's jobs, until their results are fetched "
            "or the jobs are cancelled.",
            name="max-data-per-client",
        ),
    ] = 4 * GIB
    total_bytes: Annotated[
        NumBytes, Option("Maximum size of the token ids of all jobs.", name="max-data")
    ] = 32 * GIB
    bytes_per_s: float = 16 << 10

    def __post_init__(self) -> None:
        options.check(self)

    def check(
        self, runs: Iterable[Run], uploads: Collection[Upload], job: Upload, who: str
    ) -> None:
        """Raise unless the job may be uploaded.

        Args:
            runs: All known runs, over or not.
            uploads: Other jobs that are arriving.
            job: The new job.
            who: Its client, as error messages name it.

        Raises:
            BadDataset: The job is larger than any job may be.
            OverQuota: Its client has reached a limit.
            Busy: All clients together have reached a limit.
        """
        stored = [Upload(run.owner, run.spec.train.data_bytes) for run in _with_data(runs)]
        going = [run for run in runs if not run.phase.is_over]
        self._check_client(going, stored, uploads, job, who)
        if len(going) + len(uploads) >= self.jobs:
            raise Busy(f"{self.jobs} jobs are queued or training; try again when some are over")
        stored_bytes = sum(one.num_bytes for one in (*stored, *uploads))
        if stored_bytes + job.num_bytes > self.total_bytes:
            raise Busy(
                f"all jobs take {_size(stored_bytes)} of {_size(self.total_bytes)} for tokens; try "
                "again when some are over"
            )

    def _check_client(
        self,
        going: Iterable[Run],
        stored: Iterable[Upload],
        uploads: Collection[Upload],
        job: Upload,
        who: str,
    ) -> None:
        if job.num_bytes > self.job_bytes:
            raise BadDataset(
                f"data: expected at most {self.job_bytes} bytes of tokens, got {job.num_bytes}; "
                "shorten the text, or let the operator raise coordinator --max-job-size"
            )
        own_uploads = [one for one in uploads if one.owner == job.owner]
        queued = [r for r in going if r.owner == job.owner and not r.attempt.assignments]
        if len(queued) + len(own_uploads) >= self.queued:
            raise OverQuota(
                f"{len(queued)} jobs of {who} are queued, {self.queued} are allowed; wait until "
                "one starts, or cancel one"
            )
        own = [one for one in (*stored, *own_uploads) if one.owner == job.owner]
        own_bytes = sum(one.num_bytes for one in own)
        if own_bytes + job.num_bytes > self.client_bytes:
            raise OverQuota(
                f"the jobs of {who} have {_size(own_bytes)} of tokens here, "
                f"{_size(self.client_bytes)} are allowed, and this job has "
                f"{_size(job.num_bytes)}; fetch or cancel one"
            )


def _with_data(runs: Iterable[Run]) -> Iterable[Run]:
    """Yield the runs whose tokens are stored."""
    return (run for run in runs if run.phase.has_tokens)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
