"""Calls of a client with a job, each in a blocking and in an awaitable form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

from swarm_ft.api.connections import DHT_PREFIX, parse_swarm_address
from swarm_ft.api.coordinator_calls import connection
from swarm_ft.api.forecasts import forecast_in, read_model
from swarm_ft.api.generation import GeneratedText, generate_in
from swarm_ft.api.keywords import GenerateKeywords, JobKeywords, OutputKeywords, PlanKeywords
from swarm_ft.api.loop import awaitable, blocking
from swarm_ft.api.training import (
    OnEvent,
    console_for,
    job_options,
    listener_on,
    read_job,
    run_job_in,
    submit_job,
    watch_to_end,
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
        invite: Invitation from `swarm-ft invite --role client`; `@FILE` reads it from a file.
        initial_peers: DHT addresses of a swarm without keys on this machine, without `invite`.
        dht_prefix: Name of such a swarm in the DHT.
        key_file: Path of this client's key, created if absent; None: this user's own key.
        progress: Whether to show the progress on standard error.
        on_event: Callback for every event of the run (a step, an evaluation, a status). Another
            thread calls it.
        options: Options of `swarm-ft client train`, by their names with underscores. `model` and
            `dataset` are required.

    Returns:
        A report with the run's losses, evaluations and bytes, and the place of its result.

    Raises:
        BadInput: An option, the model, the data or the invitation is not usable.
        SwarmError: The run has no result; the error is the cause.
        KeyboardInterrupt: Ctrl-C. The run goes on without this client, and `attach` returns to it.
    """
    job = job_options(dict(options))
    way = parse_swarm_address(invite, tuple(initial_peers), dht_prefix)
    key = Path(key_file) if key_file is not None else None
    return await run_job_in(way, job, key_file=key, shows=progress, on_event=on_event)


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
        invite: Invitation, see `train`.
        initial_peers: DHT addresses, see `train`.
        dht_prefix: Name of the swarm in the DHT, see `train`.
        key_file: Path of this client's key, see `train`; `attach` needs the same key.
        progress: Whether to show the progress on standard error.
        options: Options of the job, see `train`.

    Returns:
        The id of the run.

    Raises:
        BadInput: An option, the model, the data or the invitation is not usable.
        SwarmError: The coordinator refuses the job.
    """
    requested = job_options(dict(options))
    check_outputs(requested.outputs)
    console = console_for(shows=progress)
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        job = await read_job(requested, listener_on(console))
        return str((await submit_job(swarm, job, requested, console=console)).run_id)


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
        run_id: Id of the run; None for this client's only run.
        invite: Invitation, see `train`.
        initial_peers: DHT addresses, see `train`.
        dht_prefix: Name of the swarm in the DHT, see `train`.
        key_file: Path of the key that submitted the run, see `train`.
        model: Directory or hub id of the run's model, if it lies at another place here.
        progress: Whether to show the progress on standard error.
        on_event: Callback, see `train`; it gets all events from the first step on.
        outputs: Places of the result and of reports, see `train`. The default of `out` is
            "swarm-ft-output".

    Returns:
        A report with the run's losses, evaluations and bytes, and the place of its result.

    Raises:
        NotFound: This client has no such run.
        RunFailed: The run ended without a result, or its result was fetched before.
        RunMismatch: `model` is not the run's model.
        KeyboardInterrupt: Ctrl-C. The run goes on without this client.
    """
    wanted = build(Outputs, by_names(Outputs, dict(outputs)))
    check_outputs(wanted)
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        run = await attach_to(swarm, run_id, model, console_for(shows=progress))
        return await watch_to_end(run, wanted, on_event)


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
        prompt: Text to continue; with `chat=True` the user's message.
        run_id: Id of the run; None for this client's only run.
        invite: Invitation, see `train`.
        initial_peers: DHT addresses, see `train`.
        dht_prefix: Name of the swarm in the DHT, see `train`.
        key_file: Path of the key that submitted the run, see `train`.
        model: Directory or hub id of the model's tokenizer, if it lies at another place here.
        on_text: Callback for each piece of the new text. Another thread calls it.
        options: Options of `swarm-ft client generate`, such as `max_new_tokens` and `do_sample`.

    Returns:
        The new text, and its tokens.

    Raises:
        Unavailable: The run is not finished yet, or no peer of a stage answers.
        RunFailed: The run has no result, or its result was fetched.
        BadModel: The tokenizer is missing, or the swarm cannot generate with this model family.
    """
    wanted = build(GenerateOptions, by_names(GenerateOptions, dict(options)))
    console = console_for(shows=True)
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        return await generate_in(
            swarm,
            prompt,
            wanted,
            run_id=run_id,
            model=model,
            on_text=on_text or (lambda _piece: None),
            on_trouble=listener_on(console).on_line,
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
    """Forecast how long a job would take and what it would send; submits nothing.

    Args:
        model: Directory or hub id of the model.
        invite: Invitation, see `train`.
        initial_peers: DHT addresses, see `train`.
        dht_prefix: Name of the swarm in the DHT, see `train`.
        key_file: Path of this client's key, see `train`.
        options: Options of `swarm-ft plan`, by their names with underscores.

    Returns:
        A forecast with seconds, samples per second, and the bytes, memory and layers of each
        stage. Its `lines()` are the text of `swarm-ft plan`.

    Raises:
        BadInput: An option or the model is not usable.
        Unavailable: No peers can host the job now.
    """
    values = {**by_names(PlanOptions, dict(options)), "model": model}
    checkpoint, spec = await asyncio.to_thread(read_model, build(PlanOptions, values))
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        found, _ = await forecast_in(swarm, checkpoint, spec)
    return found


train, train_async = blocking("train", _train), awaitable("train_async", _train)
submit, submit_async = blocking("submit", _submit), awaitable("submit_async", _submit)
attach, attach_async = blocking("attach", _attach), awaitable("attach_async", _attach)
generate, generate_async = blocking("generate", _generate), awaitable("generate_async", _generate)
plan, plan_async = blocking("plan", _plan), awaitable("plan_async", _plan)
