"""The family "a job that ...": valid and bad jobs of clients that have good keys.

Each runs beside the honest client's runs. They end well, or are refused, or fail at their own
client; no process ends, and no peer is suspended for them.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.facts.events import Event, PeerJoined, RunSubmitted, Tick
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.errors import SwarmError
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerHello
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.run_spec import Adapter, ModelSpec, RunSpec
from tests.hostile import options
from tests.hostile.clients import (
    ENDED_S,
    BadClient,
    altered_copy,
    check_discreet,
    described,
    is_taken,
    new_client,
    short_job,
    words_of,
)
from tests.hostile.hub import CUT, WHOLE
from tests.hostile.job import NUM_BLOCKS, VOCAB_SIZE, of_model
from tests.hostile.processes import MB, Processes, attack, undisturbed
from tests.hostile.scene import Broken
from tests.specs import model_spec

JOBS_AT_ONCE = 3
"""Of one client; four may wait."""

# ---- names


LETTERS = ("a", "\u8a9e", "\U0001f600")
"""One, three and four bytes in UTF-8."""
NAME_BYTES, FILE_NAME_BYTES, NAME_CHARS = 64, 255, 64
ODD_NAMES = (
    "..",
    ".hidden",
    "-rf",
    "a b",
    "CON",
    "%2e%2e",
    "%s{0}",
    "a\u0301",
    "\u202ename",
    "a:b",
)


def names_at_bounds() -> Iterator[str]:
    """Names at each bound in bytes and in characters, and one beyond it, of each kind of letter."""
    for letter in LETTERS:
        size = len(letter.encode())
        counts = {NAME_BYTES // size, NAME_CHARS, NAME_CHARS + 1, FILE_NAME_BYTES // size - 5}
        counts |= {NAME_BYTES // size + 1}
        for count in sorted(counts):
            yield letter * count
    yield from ODD_NAMES


@attack("31-job-with-a-long-name")
async def long_name(swarm: Processes) -> None:
    """64 emoji are 256 bytes, which no file name takes."""
    client = await new_client(swarm)
    async with undisturbed(swarm):
        await named(client, "\U0001f600" * 64)


@attack("Job:names-at-their-bounds")
async def long_names(swarm: Processes) -> None:
    client = await new_client(swarm)
    together = asyncio.Semaphore(JOBS_AT_ONCE)

    async def run(name: str) -> bool:
        async with together:
            return await named(client, name)

    async with undisturbed(swarm):
        taken = await asyncio.gather(*map(run, names_at_bounds()))
    if not any(taken):
        raise Broken("all names were refused: this was no attack")


async def named(client: BadClient, name: str) -> bool:
    """Run a job of this name, with a snapshot at each step; whether it was taken.

    Raises:
        Broken: the job was taken, and did not end well.
    """
    spec = short_job(client.swarm.honest_client.job.spec, 2, save_steps=1)
    if not is_taken(await client.submit(spec, name)):
        return False
    status = await client.ended(name)
    if status.phase is not RunPhase.FINISHED:
        raise Broken(f"run {name!a} is {status.phase.name}: {words_of(status)!a}")
    await client.fetched(status)
    return True


@attack("Job:texts-at-their-bounds")
async def long_texts(swarm: Processes) -> None:
    """References, readers and targets of as many characters as they may have."""
    client, spec = await new_client(swarm), swarm.honest_client.job.spec
    for letter in LETTERS:
        readers = ",".join(letter * 60 + f"{i:03}" for i in range(16))
        targets = ",".join(letter * 60 + f"{i:03}" for i in range(64))
        jobs = (
            lambda letter=letter: of_model(spec, "aa/" + letter * 990),
            lambda readers=readers: short_job(spec, 1, share_with=readers),
            lambda targets=targets: short_job(
                spec, 1, adapter=Adapter.LORA, target_modules=targets
            ),
        )
        async with undisturbed(swarm):
            for number, make in enumerate(jobs):
                await ends(client, make, f"texts-{ord(letter):x}-{number}")


async def ends(
    client: BadClient, make: object, run_id: str, within_s: float = ENDED_S
) -> RunPhase | None:
    """Run a job that may be refused, may fail and may end well; None: it was refused.

    Raises:
        Broken: it does none of this in time.
    """
    try:
        spec: RunSpec = make()  # type: ignore[operator]
    except SwarmError:
        return None
    if not is_taken(await client.submit(spec, run_id)):
        return None
    status = await client.ended(run_id, within_s)
    if status.phase is RunPhase.FINISHED:
        await client.fetched(status)
    elif not words_of(status):
        raise Broken(f"run {run_id} is {status.phase.name} and does not say why")
    return status.phase


# ---- weights


NOT_FINITE = {
    "nan-in-block-1": ("transformer.h.1.mlp.c_fc.weight", float("nan")),
    "nan-in-block-4": ("transformer.h.4.attn.c_attn.bias", float("nan")),
    "inf-in-embeddings": ("transformer.wte.weight", float("inf")),
    "inf-in-the-last-norm": ("transformer.ln_f.weight", float("-inf")),
}


@attack("32-job-of-a-model-with-a-nan")
async def non_finite(swarm: Processes) -> None:
    """Four jobs at once; their client reads the tensor, and a peer's owner the file as well."""
    client = await new_client(swarm)
    async with undisturbed(swarm):
        for name, (tensor, value) in NOT_FINITE.items():
            folder = altered_copy(swarm, swarm.models / name, {tensor: value})
            spec = short_job(replace(swarm.honest_client.job.spec, model=described(folder)))
            if not is_taken(await client.submit(spec, name)):
                raise Broken(f"the job {name} was refused: it is no attack")
        for name, (tensor, _) in NOT_FINITE.items():
            words = await client.failed(name)
            if tensor not in words:
                raise Broken(f"{name}: the client reads no tensor: {words!a}")
            if not any(f"{tensor} in model.safetensors" in line for line in logged(swarm)):
                raise Broken(f"{name}: no peer's log names the file and the tensor")


def logged(swarm: Processes) -> Iterator[str]:
    """The lines of all peers' logs."""
    for peer in swarm.peers:
        yield from (entry.item for entry in peer.log.entries)


@attack("Job:huge-weights")
async def huge_weights(swarm: Processes) -> None:
    """Finite weights whose products are not: the client reads the step and the layers."""
    client = await new_client(swarm)
    tensors = ("transformer.h.1.mlp.c_fc.weight", "transformer.h.4.mlp.c_fc.weight")
    async with undisturbed(swarm):
        for number, tensor in enumerate(tensors):
            folder = altered_copy(swarm, swarm.models / f"huge-{number}", {tensor: 3e38})
            spec = short_job(replace(swarm.honest_client.job.spec, model=described(folder)))
            if not is_taken(await client.submit(spec, f"huge-{number}")):
                raise Broken("the job was refused: it is no attack")
        for number in range(len(tensors)):
            check_names_step(await client.failed(f"huge-{number}"))


@attack("Job:diverges")
async def diverges(swarm: Processes) -> None:
    """A learning rate of 1e9 makes weights infinite; the run fails within a minute for it."""
    client = await new_client(swarm)
    spec = short_job(swarm.honest_client.job.spec, 50, learning_rate=1e9)
    async with undisturbed(swarm):
        answer = await client.submit(spec, "diverges")
        if not is_taken(answer):
            raise Broken(f"the job was refused: {answer}")
        check_names_step(await client.failed("diverges"))


def check_names_step(words: str) -> None:
    """Refuse a reason that names no step or no layer.

    Raises:
        Broken: it lacks one.
    """
    for pattern in (r"\bstep \d+", r"\b(layer|layers|block|blocks) \d+"):
        if not re.search(pattern, words):
            raise Broken(f"the client reads no {pattern!r} in {words!a}")


@attack("Job:rate-beyond-float32")
async def rate_beyond(swarm: Processes) -> None:
    """`--lr 1e38 --clip-grad-norm 0` is refused before it starts."""
    client, spec = await new_client(swarm), swarm.honest_client.job.spec
    async with undisturbed(swarm):
        for rate in (1e38, 1e300):

            def job(rate: float = rate) -> RunSpec:
                return short_job(spec, 2, learning_rate=rate, clip_grad_norm=0.0)

            phase = await ends(client, job, f"rate-{rate:g}")
            if phase is not None:
                raise Broken(f"--lr {rate:g} --clip-grad-norm 0 started, and {phase.name}")


# ---- models of others


@attack("30-job-of-a-private-model")
async def private_model(swarm: Processes) -> None:
    """A model on the volunteers' disks that no owner lends is neither loaded nor revealed."""
    client = await new_client(swarm)
    folder = altered_copy(swarm, swarm.private / "acme", {"transformer.ln_f.bias": 0.25})
    model = described(folder)
    through = swarm.models / ".." / "private" / "acme"
    references = [str(folder), relative(folder), str(through), f"file://{folder}"]
    missing = [one.replace("acme", "none") for one in references]
    readable = {}
    async with undisturbed(swarm):
        for number, reference in enumerate((*references, *missing)):
            jobs = {
                "known": replace(model, reference=reference),
                "guessed": guess(model, reference),
            }
            for kind, wrong in jobs.items():
                run_id = f"private-{number}-{kind}"
                spec = short_job(
                    replace(swarm.honest_client.job.spec, model=wrong), 1, learning_rate=0.0
                )
                readable[reference, kind] = await refused_words(client, spec, run_id)
    words = {text.replace("acme", "none") for text in readable.values()}
    if len(words) > 1:
        raise Broken(f"a client tells models that exist from those that do not: {sorted(words)}")
    for text in words:
        check_discreet(text, "acme", str(swarm.private))


def relative(folder: Path) -> str:
    """The folder as seen from where the peers were started."""
    return os.path.relpath(folder)


def guess(model: ModelSpec, reference: str) -> ModelSpec:
    """The model as somebody describes it who does not have it."""
    wrong = (bytes(16),) * model.num_blocks
    return replace(model, reference=reference, block_digests=wrong)


async def refused_words(client: BadClient, spec: RunSpec, run_id: str) -> str:
    """The reason against a job that no peer may load, without the reference that the job names.

    Raises:
        Broken: the job was not refused and did not fail.
    """
    answer = await client.submit(spec, run_id)
    words = await client.failed(run_id) if is_taken(answer) else answer.message
    reference = spec.model.reference
    return words.replace(reference, "MODEL").replace(repr(reference), "'MODEL'")


@attack("Job:model-that-differs")
async def model_that_differs(swarm: Processes) -> None:
    """A lent model of which one part is another: the client reads which part, and nothing else.

    Another peer may have the right model, so the job may go on to wait.
    """
    client, spec = await new_client(swarm), swarm.honest_client.job.spec
    own = spec.model.block_digests
    blocks = (*own[:3], bytes(16), *own[4:])
    wrong = {
        "block": replace(spec.model, block_digests=blocks),
        "head": replace(spec.model, head_digest=bytes(16)),
        "embed": replace(spec.model, embed_digest=bytes(16)),
        "shape": replace(spec.model, hidden_size=48),
        "classes": replace(spec.model, vocab_size=VOCAB_SIZE - 1),
        "architecture": replace(spec.model, architecture="llama"),
    }
    expected = {"block": "block 3", "head": "head", "embed": "embed"}
    secrets = ["('", *(digest.hex()[:8] for digest in own)]
    async with undisturbed(swarm):
        for name, model in wrong.items():
            job = short_job(replace(spec, model=model), 1)
            answer = await client.submit(job, f"differs-{name}")
            part = expected.get(name, "model")
            taken = is_taken(answer)
            words = await client.reads(f"differs-{name}", part) if taken else answer.message
            if part not in words:
                raise Broken(f"{name}: the client does not read which part differs: {words!a}")
            check_discreet(words.replace(job.model.reference, "MODEL"), *secrets)


LITTLE = MB // 4
"""Bytes of a large file that somebody may fetch to know how large its tensors are."""


@attack("41-job-of-a-hub-model-without-bounds")
async def hub_model(swarm: Processes) -> None:
    """A hub's model of 8 GiB, which the job calls small, is not fetched.

    What is fetched is fetched without the token of the peer's owner.
    """
    client, spec = await new_client(swarm), swarm.honest_client.job.spec
    async with undisturbed(swarm):
        for number, reference in enumerate((WHOLE, CUT)):
            job = short_job(replace(spec, model=guess(spec.model, reference)), 1)
            await refused_words(client, job, f"hub-{number}")
    if not swarm.hub.requests:
        raise Broken("no peer asked the hub: this was no attack")
    if swarm.hub.weight_bytes > LITTLE:
        raise Broken(f"peers fetched {swarm.hub.weight_bytes} bytes of weights")
    if swarm.hub.tokens:
        raise Broken(f"the hub received the owner's own token, at {swarm.hub.requests[:3]}")


# ---- results that cannot be written


WIDE, RESULT_BYTES = 384, 4 * MB
"""Channels of a model whose trained stages are larger than the limit; the honest ones are not."""


@attack("Job:result-that-cannot-be-written")
async def unwritable(swarm: Processes) -> None:
    """Peers that may write no large file: the job fails, or waits until they may."""
    client = await new_client(swarm)
    spec = short_job(replace(swarm.honest_client.job.spec, model=wide_model(swarm.models / "wide")))
    async with undisturbed(swarm):
        with file_size_limited(swarm, RESULT_BYTES):
            if not is_taken(await client.submit(spec, "unwritable")):
                raise Broken("the job was refused: it is no attack")
            await until_trained(client, "unwritable", spec.train.num_steps)
            await swarm.honest_client.another_run()
        status = await client.ended("unwritable")
        if status.phase is RunPhase.FINISHED:
            await client.fetched(status)
        elif status.phase is not RunPhase.FAILED or not words_of(status):
            raise Broken(f"the run is {status.phase.name}: {words_of(status)!a}")


def wide_model(folder: Path) -> ModelSpec:
    """A model of a few MB a stage."""
    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=32,
        n_embd=WIDE,
        n_layer=NUM_BLOCKS,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return described(folder)


@contextmanager
def file_size_limited(swarm: Processes, at_most_bytes: int) -> Iterator[None]:
    """No peer can write a file larger than this, as on a disk that is full."""
    usual = {peer.pid: resource.prlimit(peer.pid, resource.RLIMIT_FSIZE) for peer in swarm.peers}
    for pid, (_, hard) in usual.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (at_most_bytes, hard))
    try:
        yield
    finally:
        for pid, limits in usual.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


async def until_trained(client: BadClient, run_id: str, num_steps: int) -> None:
    """Wait until a run has committed its steps, or is over."""
    async with asyncio.timeout(ENDED_S):
        while True:
            runs = {run.run_id: run for run in (await client.calls.status()).runs}
            run = runs[RunId(run_id)]
            if run.committed_steps >= num_steps or run.phase.is_over:
                return
            await asyncio.sleep(0.1)


# ---- options


COMPILED_S = 150.0
"""In which a job ends whose codecs are compiled at the peers first, on a busy machine."""


@attack("Job:options-at-their-bounds")
async def options_alone(swarm: Processes) -> None:
    """Each numeric option at each end of its bounds, alone; a job for each."""
    async with undisturbed(swarm):
        phases = await alone(swarm)
    if RunPhase.FINISHED not in phases.values():
        raise Broken("no job ended well: this was no attack")


@attack("Job:options-at-their-bounds-together")
async def options_together(swarm: Processes) -> None:
    """Each end with each other's: those that end well all together in few jobs, others by one."""
    async with undisturbed(swarm):
        phases = await alone(swarm)
        fine = [end for end, phase in phases.items() if phase is RunPhase.FINISHED]
        mixed = options.covering(fine)
        failing = [end for end, phase in phases.items() if phase is not RunPhase.FINISHED]
        mixed += [options.with_end(end, job) for end in failing for job in options.extremes(fine)]
        await run_all(swarm, mixed)


async def alone(swarm: Processes) -> dict[options.End, RunPhase | None]:
    """Return how a job with one option at one end ends; a swarm runs these once."""
    if not swarm.ends:
        ends = [(end,) for end in options.all_ends()]
        phases = await run_all(swarm, ends)
        swarm.ends.update({end: phases[end,] for (end,) in ends})
    return swarm.ends


async def run_all(
    swarm: Processes, jobs: Sequence[options.Ends]
) -> dict[options.Ends, RunPhase | None]:
    """Run these jobs and return their last phases; None: it was refused.

    Raises:
        Broken: one does not end, or ends without a reason.
    """
    client, together = await new_client(swarm), asyncio.Semaphore(JOBS_AT_ONCE)
    problems = list[str]()

    async def run(number: int, ends_of_it: options.Ends) -> RunPhase | None:
        async with together:

            def make() -> RunSpec:
                return options.job_with(swarm.honest_client.job.spec, ends_of_it)

            try:
                run_id = f"options-{client.identity.name[:8]}-{number}"
                return await ends(client, make, run_id, COMPILED_S)
            except Broken as error:
                problems.append(f"{', '.join(map(str, ends_of_it))}: {error}")
                return None

    phases = await asyncio.gather(*(run(n, job) for n, job in enumerate(jobs)))
    if problems:
        raise Broken(f"{len(problems)} of {len(jobs)} jobs: {problems}")
    return dict(zip(jobs, phases, strict=True))


# ---- jobs that are costly to decide about


MEMBERS, BLOCKS = 40, 4096
EVENT_S, TICK_S = 0.5, 0.05
"""CPU that one decision may take, and a tick in the mean: everybody else waits for it."""


@attack("34-job-of-4096-blocks-for-40-peers")
async def many_blocks(swarm: Processes) -> None:
    """Jobs of 4,096 blocks: one fits 40 peers, four fit nobody; decisions alone, no sockets.

    Real peers of so many would not fit on a machine. The cost of many small jobs that wait is held
    by `tests/unit/coordinator/plan/test_allocation.py`.
    """
    train = swarm.honest_client.job.spec.train
    fitting = model_spec(num_blocks=BLOCKS, block_bytes=1 << 20)
    too_large = model_spec(num_blocks=BLOCKS, block_bytes=1 << 40)
    specs = [RunSpec(model=model, train=train) for model in (fitting, *[too_large] * 4)]
    async with undisturbed(swarm):
        await asyncio.to_thread(check_decisions, specs)


def check_decisions(specs: Sequence[RunSpec]) -> None:
    """Refuse a coordinator that decides for long, while jobs are submitted and members join.

    A quarter of a second of its clock passes between two ticks.

    Raises:
        Broken: a decision takes longer than `EVENT_S`, or ticks longer than `TICK_S` in the mean.
    """
    state, now_s, ticks_s = SwarmState(), 0.0, list[float]()

    def happens(event: Event) -> None:
        nonlocal state
        began_s = time.thread_time()
        state, _ = decide(state, event, now_s)
        took_s = time.thread_time() - began_s
        if took_s > EVENT_S:
            raise Broken(f"to decide about {type(event).__name__} takes {took_s:.2f} s of CPU")
        ticks_s.extend([took_s] if isinstance(event, Tick) else [])

    for number, spec in enumerate(specs):
        happens(RunSubmitted(RunId(f"run-{number}"), spec, f"owner-{number}", bytes(32), 3))
    for number in range(MEMBERS + TICKS):
        if number < MEMBERS:
            happens(PeerJoined(automatic(number), Grant()))
        now_s += SECONDS_OF_TICK
        happens(Tick())
    if fmean(ticks_s) > TICK_S:
        raise Broken(f"a tick takes {fmean(ticks_s):.3f} s of CPU in the mean")


TICKS, SECONDS_OF_TICK = 40, 0.25


def automatic(number: int) -> PeerHello:
    """A peer of 64 GiB that lets the coordinator choose its layers."""
    return PeerHello(
        peer_id=PeerId(f"peer-{number}"),
        endpoint=f"10.0.0.{number}:7000",
        layers=None,
        memory_bytes=1 << 36,
    )
