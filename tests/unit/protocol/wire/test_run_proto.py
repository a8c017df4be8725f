"""run.proto, which is written by hand, has the fields of the specs and holds all their values."""

from dataclasses import fields
from enum import IntEnum
from types import GenericAlias
from typing import Any, get_args, get_origin

import pytest
from google.protobuf.descriptor import FieldDescriptor

from swarm_ft.proto import run_pb2 as pb
from swarm_ft.protocol.spec.bounds import Range, field_hints, metadata
from swarm_ft.protocol.spec.run_spec import (
    Adapter,
    BaseDtype,
    Dtype,
    EvalCompression,
    EvalStrategy,
    LrSchedule,
    ModelSpec,
    Optim,
    SaveStrategy,
    TaskKind,
    TrainSpec,
)

MESSAGES: dict[type, Any] = {
    ModelSpec: pb.ModelSpec.DESCRIPTOR,
    TrainSpec: pb.TrainSpec.DESCRIPTOR,
}
SPECS = pytest.mark.parametrize("spec", MESSAGES, ids=lambda spec: spec.__name__)
KINDS: dict[object, set[int]] = {
    int: {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64},
    float: {FieldDescriptor.TYPE_DOUBLE},
    bool: {FieldDescriptor.TYPE_BOOL},
    str: {FieldDescriptor.TYPE_STRING},
    bytes: {FieldDescriptor.TYPE_BYTES},
    tuple[bytes, ...]: {FieldDescriptor.TYPE_BYTES},
    tuple[int, ...]: {FieldDescriptor.TYPE_UINT32},
    LrSchedule: {FieldDescriptor.TYPE_ENUM},
    EvalStrategy: {FieldDescriptor.TYPE_ENUM},
    EvalCompression: {FieldDescriptor.TYPE_ENUM},
    TaskKind: {FieldDescriptor.TYPE_ENUM},
    Adapter: {FieldDescriptor.TYPE_ENUM},
    BaseDtype: {FieldDescriptor.TYPE_ENUM},
    Dtype: {FieldDescriptor.TYPE_ENUM},
    Optim: {FieldDescriptor.TYPE_ENUM},
    SaveStrategy: {FieldDescriptor.TYPE_ENUM},
}
LARGEST = {FieldDescriptor.TYPE_UINT32: 2**32 - 1, FieldDescriptor.TYPE_UINT64: 2**64 - 1}


def bare(hint: Any) -> object:
    if type(None) in get_args(hint):
        return bare(next(one for one in get_args(hint) if one is not type(None)))
    hint = hint.__origin__ if metadata(hint) else hint
    if get_origin(hint) is tuple:
        return GenericAlias(tuple, tuple(bare(one) for one in get_args(hint)))
    return hint


@SPECS
def test_fields_have_the_same_names(spec: type) -> None:
    theirs = MESSAGES[spec].fields_by_name
    assert set(theirs) == {field.name for field in fields(spec)}


@SPECS
def test_fields_are_of_the_same_kind(spec: type) -> None:
    for name, hint in field_hints(spec).items():
        theirs = MESSAGES[spec].fields_by_name[name]
        assert theirs.type in KINDS[bare(hint)], name
        assert theirs.is_repeated == (get_origin(bare(hint)) is tuple), name


@SPECS
def test_every_number_within_its_bounds_has_room(spec: type) -> None:
    for name, hint in field_hints(spec).items():
        kind = MESSAGES[spec].fields_by_name[name].type
        for bound in metadata(hint):
            if isinstance(bound, Range) and kind in LARGEST:
                assert 0 <= bound.minimum <= bound.maximum <= LARGEST[kind], name


def test_numbers_of_a_training_are_bounded() -> None:
    for name, hint in field_hints(TrainSpec).items():
        if bare(hint) in (int, float):
            assert metadata(hint), name


@pytest.mark.parametrize(
    ("kind", "descriptor", "prefix"),
    [
        (LrSchedule, pb.LrSchedule.DESCRIPTOR, "LR_SCHEDULE"),
        (EvalStrategy, pb.EvalStrategy.DESCRIPTOR, "EVAL_STRATEGY"),
        (EvalCompression, pb.EvalCompression.DESCRIPTOR, "EVAL_COMPRESSION"),
        (TaskKind, pb.TaskKind.DESCRIPTOR, "TASK_KIND"),
        (Adapter, pb.Adapter.DESCRIPTOR, "ADAPTER"),
        (BaseDtype, pb.BaseDtype.DESCRIPTOR, "BASE_DTYPE"),
        (Dtype, pb.Dtype.DESCRIPTOR, "DTYPE"),
        (Optim, pb.Optim.DESCRIPTOR, "OPTIM"),
        (SaveStrategy, pb.SaveStrategy.DESCRIPTOR, "SAVE_STRATEGY"),
    ],
)
def test_enums_have_the_same_names_and_numbers(
    kind: type[IntEnum], descriptor: Any, prefix: str
) -> None:
    theirs = {value.name: value.number for value in descriptor.values}
    assert theirs == {f"{prefix}_UNSPECIFIED": 0} | wire_names(kind, prefix)


def wire_names(kind: type[IntEnum], prefix: str) -> dict[str, int]:
    return {f"{prefix}_{one.name}": one.value for one in kind}
