"""The bytes of one example of every message: they change only with the version of the protocol.

So do the declarations of all messages, which have fields that an example leaves at zero. After a
change that is meant: raise `PROTOCOL_VERSION`, then

    python -m tests.unit.protocol.wire.test_golden_bytes

in the repository's root writes the new ones beside the old. Those of a version that the main branch
has stay as they are, released or not: two checkouts with one number have the same messages.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.digest import digest_of
from swarm_ft.ids import MicrobatchIndex, SampleId
from swarm_ft.protocol.messages.boundary import Ack, FrameKind, SideInfoPart
from swarm_ft.protocol.messages.control import PlanStep, WholeTokens
from swarm_ft.protocol.messages.reduction import PieceAck
from swarm_ft.protocol.messages.reports import SampleSet
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, ChunkList
from swarm_ft.protocol.spec.addresses import IpAndPort
from swarm_ft.protocol.spec.bounds import HostAndPort, Length, OneOf, Range, field_hints
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec, TrainSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField
from tests.specs import model_spec, run_spec, train_spec
from tests.unit.protocol.wire.wire_values import WIRES, annotation_of, has_fields, kinds_of, present

GOLDEN = Path(__file__).with_name("golden_bytes.json")
ROOT = Path(__file__).parents[4]
DECLARATIONS = "(declarations)"
_FIXED: dict[Any, Any] = {
    LayerRange: LayerRange(2, 5),
    SampleSet: SampleSet(b"\x05\x80"),
    ModelSpec: model_spec(),
    TrainSpec: train_spec(),
    RunSpec: run_spec(),
    ChunkList: ChunkList(total_bytes=CHUNK_BYTES + 7, digests=(b"a" * 16, b"b" * 16)),
    EncodedTensor: EncodedTensor(parse_codec_spec("aq4", Direction.FORWARD), 2, 3, b"payload"),
    FrameKind: FrameKind.DELTA,
    SideInfoPart: SideInfoPart(b"d" * 16, 102),  # whose fields have other names on the wire
    str: "text",
    bool: True,
    float: 0.75,
}


def example_of(kind: Any, descriptor: Descriptor) -> Any:
    """Return a value that depends only on the types of its fields, and sets them all."""
    if kind in _FIXED:
        return _FIXED[kind]
    hints = field_hints(kind)
    if kind in (Ack, PieceAck):
        return kind(example_of(hints["key"], descriptor))
    found = descriptor.fields_by_name
    values = {name: _example(hint, found[name], name) for name, hint in hints.items()}
    if kind is PlanStep:  # whose microbatches are numbered, and have each sample once
        (batch,) = values["evaluation"]
        (first,) = batch.samples
        held_out = replace(batch, index=MicrobatchIndex(1), samples=(SampleId(first + 1),))
        (length,) = values["lengths"]
        values |= {"evaluation": (held_out,), "lengths": (length,) * 2}
        values["documents"] = {first: (2, length - 2)}
    return kind(**values)


def _example(hint: Any, field: FieldDescriptor, name: str) -> Any:
    kind, notes = annotation_of(present(hint))
    if get_origin(kind) is dict:
        key, value = get_args(kind)
        if key is SampleId:
            return {0: bytes(8), 1: b"\1\0\0\0"}
        assert field.message_type is not None
        of_key, of_value = field.message_type.fields
        return {_example(key, of_key, name): _example(value, of_value, name)}
    if get_origin(kind) is not None:
        # Microbatches count from 0, and no sample comes twice.
        entries = next((note.minimum for note in notes if isinstance(note, Length)), 1)
        return get_origin(kind)([_example(get_args(kind)[0], field, name)] * max(1, entries))
    if any(isinstance(note, HostAndPort) for note in notes):
        return "peer.example:7001"
    if any(isinstance(note, IpAndPort) for note in notes):
        return "198.51.100.7:7001"
    if kind in _FIXED:
        return _FIXED[kind]
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return max(kind)
    if isinstance(kind, type) and has_fields(kind):
        assert field.message_type is not None
        return example_of(kind, field.message_type)
    if kind is bytes:
        return _bytes(notes)
    return _number(notes, field, name)


def _bytes(notes: tuple[Any, ...]) -> bytes:
    if any(isinstance(note, WholeTokens) for note in notes):
        return bytes(range(4))
    return b"d" * 16  # a digest, or any other bytes


def _number(notes: tuple[Any, ...], field: FieldDescriptor, name: str) -> int:
    if any(isinstance(note, VersionField) for note in notes):
        return PROTOCOL_VERSION
    for note in notes:
        if isinstance(note, OneOf):
            return int(str(note.values[0]))
        if isinstance(note, Range) and note.maximum < 100 + field.number:
            return int(note.maximum)
    return 0 if name == "index" else 100 + field.number


def present_bytes() -> dict[str, str]:
    """Return the bytes of an example of each message by its name, and a digest of declarations."""
    found = {
        f"{wire.name}.{place}".rstrip("."): wire.to_bytes(example_of(*kind)).hex()
        for wire in WIRES.values()
        for place, kind in kinds_of(wire).items()
    }

    found[DECLARATIONS] = digest_of(*sorted(_declared())).hex()
    return found


def _declared() -> set[bytes]:
    """Return every field of every message that travels, with its number and type."""
    known: set[bytes] = set()
    waiting: list[Any] = [wire.message.DESCRIPTOR for wire in WIRES.values()]
    seen = set()
    while waiting:
        message = waiting.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            kind = field.message_type or field.enum_type
            named = kind.full_name if kind else ""
            words = field.full_name, field.number, field.type, field.is_repeated, named
            known.add(repr((*words, field.has_presence)).encode())
            if field.message_type:
                waiting.append(field.message_type)
            elif field.enum_type:
                values = [(value.name, value.number) for value in field.enum_type.values]
                known.add(repr((field.enum_type.full_name, values)).encode())
    return known


def test_bytes_change_only_with_the_version() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert str(PROTOCOL_VERSION) in golden, "a new version: write down its bytes, see above"
    assert present_bytes() == golden[str(PROTOCOL_VERSION)], "raise PROTOCOL_VERSION, see above"
    assert max(map(int, golden)) == PROTOCOL_VERSION


def test_the_main_branchs_versions_keep_their_bytes() -> None:
    golden, on_main = json.loads(GOLDEN.read_text()), _golden_on_main()
    if not on_main:
        pytest.skip("git knows no earlier commit here")
    for version, before in on_main.items():
        assert golden.get(version) == before, f"raise PROTOCOL_VERSION above {version}, see above"


def _golden_on_main() -> dict[str, dict[str, str]]:
    """Return the file at this branch's fork from the main one, or a commit ago on main itself.

    Empty if git has no such commit.
    """
    head = _git("rev-parse", "HEAD")
    left = next(filter(None, (_git("merge-base", "HEAD", n) for n in ("main", "origin/main"))), "")
    if not left or left == head:
        left = _git("rev-parse", "HEAD^1")
    path = GOLDEN.relative_to(ROOT).as_posix()
    found = _git("show", f"{left}:{path}") if left else ""
    earlier: dict[str, dict[str, str]] = json.loads(found or "{}")
    return earlier


def _git(*words: str) -> str:
    """Return git's output; empty if it refuses, or is not installed."""
    try:
        done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def test_golden_bytes_are_read_as_they_were_written() -> None:
    golden = json.loads(GOLDEN.read_text())[str(PROTOCOL_VERSION)]
    del golden[DECLARATIONS]
    for name, data in golden.items():
        message, _, place = name.partition(".")
        wire = WIRES[message]
        assert wire.from_bytes(bytes.fromhex(data)) == example_of(*kinds_of(wire)[place])


def write_down() -> None:
    """Add the present version's bytes to the file, unless other ones are there."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    ours, version = present_bytes(), str(PROTOCOL_VERSION)
    if _golden_on_main().get(version, ours) != ours:
        raise SystemExit(f"other bytes are version {version} on the main branch; raise it")
    golden[version] = ours
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    write_down()
