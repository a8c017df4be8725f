"""Calls of a client with a job, each in a form that waits and in one that is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

from swarm_ft.api.asking import connection
from swarm_ft.api.generating import GeneratedText, generate_in
from swarm_ft.api.joining import DHT_PREFIX, way_to
from swarm_ft.api.keywords import GenerateKeywords, JobKeywords, OutputKeywords, PlanKeywords
from swarm_ft.api.loop import awaits, waits
from swarm_ft.api.planning import forecast_in, read_model
from swarm_ft.api.training import (
    OnEvent,
    begun,
    console_for,
    finished,
    job_options,
    listener_on,
    read,
    run_job_in,
)
from swarm_ft.client.forecast import Forecast
from swarm_ft.client.job import check_outputs
from swarm_ft.client.options import GenerateOptions, Outputs, PlanOptions
from swarm_ft.client.report import RunReport
from swarm_ft.client.train import attach_to
from swarm_ft.protocol.spec.options import build, by_names


async def _train(
    *,
    invite: str | None = None,
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    key_file: str | Path | None = None,
    progress: bool = True,
    on_event: OnEvent | None = None,
    **options: Unpack[JobKeywords],
) -> RunReport:
    """Fine-tune a model in a swarm, and fetch the result into `out`.

    Args:
        invite: an invitation for a client, as `swarm-ft invite --role client` prints it; `@FILE`
            reads it from a file.
        initial_peers: without an invitation, DHT addresses of a swarm without keys, here.
        dht_prefix: of such a swarm.
        key_file: of this client's key, made if absent; None: this user's own.
        progress: whether it is shown on standard error.
        on_event: called with every event of the run (a step, an evaluation, a status), in another
            thread.
        options: those of `swarm-ft client train`, by their names with underscores; `model` and
            `dataset` are required.

    Returns:
        The run's losses, evaluations and bytes, and where its result is.

    Raises:
        BadInput: an option, the model, the data or the invitation is not usable.
        SwarmError: why there is no result.
        KeyboardInterrupt: Ctrl-C; the run goes on without this client, and `attach` returns to it.
    """
    asked = job_options(dict(options))
    way = way_to(invite, tuple(initial_peers), dht_prefix)
    key = Path(key_file) if key_file is not None else None
    return await run_job_in(way, asked, key_file=key, shows=progress, on_event=on_event)


async def _submit(
    *,
    invite: str | None = None,
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    key_file: str | Path | None = None,
    progress: bool = True,
    **options: Unpack[JobKeywords],
) -> str:
    """Submit a job and return; `attach` watches it and fetches its result.

    Args:
        invite: as of `train`.
        initial_peers: as of `train`.
        dht_prefix: as of `train`.
        key_file: as of `train`; `attach` needs the same.
        progress: as of `train`.
        options: as of `train`.

    Returns:
        The run's id.

    Raises:
        BadInput: an option, the model, the data or the invitation is not usable.
        SwarmError: the coordinator refuses the job.
    """
    asked = job_options(dict(options))
    check_outputs(asked.outputs)
    console = console_for(shows=progress)
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        job = await read(asked, listener_on(console))
        return str((await begun(swarm, job, asked, console=console)).run_id)


async def _attach(
    run_id: str | None = None,
    *,
    invite: str | None = None,
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    key_file: str | Path | None = None,
    model: str | None = None,
    progress: bool = True,
    on_event: OnEvent | None = None,
    **outputs: Unpack[OutputKeywords],
) -> RunReport:
    """Return to a run: watch it to its end, and fetch the result into `out`.

    Args:
        run_id: the run; None for this client's only one.
        invite: as of `train`.
        initial_peers: as of `train`.
        dht_prefix: as of `train`.
        key_file: as of `train`; the same as then.
        model: directory or hub id of the model, if it is not where the run says.
        progress: as of `train`.
        on_event: as of `train`; events from the first step on come again.
        outputs: where the result and reports go, as of `train`; `out` is "swarm-ft-output".

    Returns:
        The run's losses, evaluations and bytes, and where its result is.

    Raises:
        NotFound: there is no such run.
        RunFailed: the run ended without a result, or its result was fetched already.
        RunMismatch: `model` is not the model that the run began with.
        KeyboardInterrupt: Ctrl-C; the run goes on without this client.
    """
    wanted = build(Outputs, by_names(Outputs, dict(outputs)))
    check_outputs(wanted)
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        run = await attach_to(swarm, run_id, model, console_for(shows=progress))
        return await finished(run, wanted, on_event)


async def _generate(
    prompt: str,
    run_id: str | None = None,
    *,
    invite: str | None = None,
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    key_file: str | Path | None = None,
    model: str | None = None,
    on_text: Callable[[str], object] | None = None,
    **options: Unpack[GenerateKeywords],
) -> GeneratedText:
    """Continue a prompt with a finished run's model, before its result is fetched.

    Args:
        prompt: the text; with `chat=True` what a user says.
        run_id: the run; None for this client's only one.
        invite: as of `train`.
        initial_peers: as of `train`.
        dht_prefix: as of `train`.
        key_file: as of `train`; the same as then.
        model: where the model's tokenizer lies, if not where the run says.
        on_text: called with each piece of the new text as it comes, in another thread.
        options: `max_new_tokens`, `do_sample` and others of `swarm-ft client generate`.

    Returns:
        The new text, and its tokens.

    Raises:
        Unavailable: the run is not finished yet, or no peer of a stage answers.
        RunFailed: the run has no result, or its result was fetched.
        BadModel: the tokenizer is not there, or the model's family cannot generate so.
    """
    asked = build(GenerateOptions, by_names(GenerateOptions, dict(options)))
    console = console_for(shows=True)
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        return await generate_in(
            swarm,
            prompt,
            asked,
            run_id=run_id,
            model=model,
            on_text=on_text or (lambda _piece: None),
            on_trouble=listener_on(console).tell,
        )


async def _plan(
    model: str,
    *,
    invite: str | None = None,
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    key_file: str | Path | None = None,
    **options: Unpack[PlanKeywords],
) -> Forecast:
    """Forecast how long a job would take and what it would send; nothing begins.

    Args:
        model: directory or hub id.
        invite: as of `train`.
        initial_peers: as of `train`.
        dht_prefix: as of `train`.
        key_file: as of `train`.
        options: those of `swarm-ft plan`, by their names with underscores.

    Returns:
        Seconds, samples a second, and bytes, memory and layers of each stage; `lines()` is the
        text of `swarm-ft plan`.

    Raises:
        BadInput: an option or the model is not usable.
        Unavailable: no peers would host the job now.
    """
    given = {**by_names(PlanOptions, dict(options)), "model": model}
    checkpoint, spec = await asyncio.to_thread(read_model, build(PlanOptions, given))
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        found, _ = await forecast_in(swarm, checkpoint, spec)
    return found


train, train_async = waits("train", _train), awaits("train_async", _train)
submit, submit_async = waits("submit", _submit), awaits("submit_async", _submit)
attach, attach_async = waits("attach", _attach), awaits("attach_async", _attach)
generate, generate_async = waits("generate", _generate), awaits("generate_async", _generate)
plan, plan_async = waits("plan", _plan), awaits("plan_async", _plan)
