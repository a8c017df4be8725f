"""JSON documents of a swarm's status, events and losses, for `--json` and the web page."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from swarm_ft.protocol.messages.client import (
        BoundaryStatus,
        Evaluated,
        MemberLink,
        MemberStatus,
        MemberWork,
        RunSummary,
        StepCommitted,
        SwarmStatus,
    )
    from swarm_ft.protocol.messages.events import SwarmEvent
    from swarm_ft.protocol.spec.grant import Grant


def status_fields(found: SwarmStatus) -> dict[str, Any]:
    """Return the document of a swarm's status."""
    from swarm_ft.protocol.messages.enrolment import name_lookup

    name_of = name_lookup(found.names)
    relays = [
        {
            "relay": r.name,
            "name": name_of(r.name),
            "endpoint": r.endpoint,
            "links": r.links,
            "bytes": r.relayed_bytes,
        }
        for r in found.relays
    ]
    return {
        "version": found.version,
        "unix_s": found.unix_s,
        "next_event": found.next_event,
        "peers": [_member_fields(member, name_of) for member in found.members],
        "runs": [_run_fields(run, name_of) for run in found.runs],
        "relays": relays,
        "contributors": [
            {
                "peer": one.peer_id,
                "name": name_of(one.peer_id),
                **_flat(one.given),
                "words": str(one.given),
            }
            for one in found.contributors
        ],
        "warnings": list(found.warnings),
    }


def _member_fields(member: MemberStatus, name_of: Callable[[str], str]) -> dict[str, Any]:
    return {
        "peer": member.peer_id,
        "name": name_of(member.peer_id),
        "layers": str(member.layers or "auto"),
        "state": member.state.name.lower(),
        "idle": member.idle,
        **grant_fields(member.grant),
        "endpoint": member.endpoint,
        "device": member.device,
        "memory_bytes": member.memory_bytes,
        "offered_bytes": member.offered_bytes,
        "version": member.version,
        "protocol": member.speaks,
        "joined_ago_s": member.joined_ago_s,
        "heard_ago_s": member.heard_ago_s,
        "machine": _flat(member.machine),
        "works": [_work_fields(work) for work in member.works],
        "links": [_link_fields(link) for link in member.links],
        "given": _flat(member.given),
    }


def _link_fields(link: MemberLink) -> dict[str, Any]:
    speed = link.speed
    return {
        "peer": link.peer_id,
        "way": str(link.way) if link.way is not None else None,
        "bytes_per_s": speed.bytes_per_s or None,
        "peak_bytes_per_s": speed.peak_bytes_per_s or None,
        "round_trip_s": speed.round_trip_s or None,
        "least_round_trip_s": speed.least_round_trip_s or None,
    }


def _work_fields(work: MemberWork) -> dict[str, Any]:
    return {
        "run": work.run_id,
        "layers": str(work.layers),
        "stage": work.stage,
        "replica": work.replica,
        "replicas": work.num_replicas,
        "doing": work.doing.name.lower(),
        "waits_for": list(work.waits_for),
        "share": work.share,
        "parts_begun": work.parts_begun,
        "num_parts": work.num_parts,
        "microbatch_s": work.microbatch_s,
    }


def _run_fields(run: RunSummary, name_of: Callable[[str], str]) -> dict[str, Any]:
    from swarm_ft.client.formatting import kind_fields

    return {
        "run": run.run_id,
        "phase": run.phase.name.lower(),
        "detail": run.detail,
        "own": run.is_own,
        "model": run.model,
        "steps": run.committed_steps,
        "num_steps": run.num_steps,
        "paused": run.is_paused,
        "learning_rate": run.learning_rate,
        "codecs": asdict(run.codecs) if run.codecs is not None else None,
        "quality": asdict(run.quality) if run.quality is not None else None,
        "place": run.place,
        "behind": run.behind,
        "last_step": _step_fields(run.last_step) if run.last_step else None,
        "last_evaluation": _eval_fields(run.last_evaluation) if run.last_evaluation else None,
        "step_s": run.step_s,
        "samples_per_s": run.samples_per_s,
        "tokens_per_s": run.tokens_per_s,
        "eta_s": run.eta_s,
        "eta_range_s": None if run.eta_low_s is None else [run.eta_low_s, run.eta_high_s],
        "snapshots": list(run.snapshots),
        "bytes": kind_fields(run.sent),
        "bytes_saved": run.bytes_saved,
        "relayed_bytes": run.sent.relayed_bytes,
        "stages": [
            {
                "peer": s.peer_id,
                "name": name_of(s.peer_id),
                "layers": str(s.layers),
                "joining": s.peer_id in run.joining,
            }
            for s in run.assignments
        ],
        "boundaries": [_boundary_fields(boundary) for boundary in run.boundaries],
    }


def _boundary_fields(status: BoundaryStatus) -> dict[str, object]:
    return {
        **_flat(status.kept),
        "samples": status.buffered_samples,
        "records": status.kept.samples,
        "key_frames": status.key_frames,
        "delta_frames": status.delta_frames,
        "hit_rate": status.hit_rate,
        "forward_codec": status.forward_codec,
        "backward_codec": status.backward_codec,
        "ratio": status.ratio,
        "step_bytes": status.newest.forward_bytes + status.newest.backward_bytes,
    }


def grant_fields(grant: Grant) -> dict[str, Any]:
    """Return the fields of a member's permissions and weight."""
    layers = None if grant.layers is None else str(grant.layers)
    tokens = {"replica_only": grant.replica_only, "sees_tokens": grant.sees_tokens}
    return {**tokens, "only_layers": layers, "weight": grant.weight}


def event_fields(event: SwarmEvent) -> dict[str, Any]:
    """Return the document of an event."""
    from swarm_ft.protocol.spec.member_name import default_name

    peer = event.peer_id
    return {
        "serial": event.serial,
        "unix_s": event.unix_s,
        "kind": event.kind.label,
        "run": event.run_id,
        "peer": peer,
        "name": None if peer is None else event.peer_name or default_name(peer),
        "from_step": event.from_step,
        "to_step": event.to_step,
        "words": event.words,
        "actor": event.actor.label if event.actor is not None else None,
    }


def row_fields(row: StepCommitted | Evaluated) -> dict[str, Any]:
    """Return the document of a step or an evaluation."""
    from swarm_ft.protocol.messages.client import StepCommitted

    return _step_fields(row) if isinstance(row, StepCommitted) else _eval_fields(row)


def _step_fields(step: StepCommitted) -> dict[str, Any]:
    return {
        "step": step.step,
        "loss": _finite(step.loss),
        "learning_rate": step.learning_rate,
        "grad_norm": _finite(step.grad_norm),
        "seconds": step.seconds,
        "samples": step.num_samples,
    }


def _eval_fields(found: Evaluated) -> dict[str, Any]:
    return {
        "step": found.step,
        "eval_loss": _finite(found.eval_loss),
        "compressed_eval_loss": _finite(found.compressed_eval_loss),
        "eval_samples": found.num_samples,
    }


def _flat(value: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a flat dataclass, many times as fast as `asdict`."""
    return {name: getattr(value, name) for name in _names(type(value))}


@functools.cache
def _names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
