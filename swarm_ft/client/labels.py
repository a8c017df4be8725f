"""Names of a job's classes: from `--labels` or the data, in the order of the model's outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_ft.client.data.classes import FoundClasses, merged_classes, some_of
from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.sources import classes_in
from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.tasks import task_of


@dataclass(frozen=True, slots=True)
class ClassNames:
    """Names of all classes of a job.

    Attributes:
        names: Names in the order of the model's outputs.
        counted_names: Names in the order in which numbers in the data count them from 0; empty if
            numbers are names themselves.
        note: A line for people; empty for none.
    """

    names: tuple[str, ...] = ()
    counted_names: tuple[str, ...] = ()
    note: str = ""


def class_names(
    options: JobOptions, known: tuple[str, ...], held_out: tuple[str, DataSelection] | None
) -> ClassNames:
    """Return the names of all classes, reading the data for them if needed.

    Args:
        options: Options of a job whose task has classes.
        known: Names of classes that the model has, by number.
        held_out: Path and selection of the evaluation data; None without any.

    Raises:
        BadDataset: The data has fewer than two classes, or others than the model.
        BadOption: The names cannot be used, or differ from those of the model.
    """
    if any("," in name for name in known):
        raise BadOption(f"--model {options.model}: its classes have commas in their names")
    if options.train.labels:
        return _names_of_option(options.train.labels, known)
    wanted = DataSelection(split=options.split, format=options.reading.data_format)
    task = task_of(options.train)
    found, note = FoundClasses(()), ""
    for path in options.datasets:
        more = classes_in(path, wanted, options.reading, task)
        found = merged_classes(found, more, path) if found.names else more
    if held_out is not None:
        path, held_out_wanted = held_out
        of_held_out = classes_in(path, held_out_wanted, options.reading, task)
        merged = merged_classes(found, of_held_out, path)
        note = _note_of_missing(found, merged, path)
        found = merged
    source = ", ".join(options.datasets)
    if len(found.names) < 2:
        names_found = ", ".join(f"'{name}'" for name in found.names) or "none"
        raise BadDataset(f"dataset '{source}': expected two classes or more, found {names_found}")
    names = _known_names(found, known, source) if known else ClassNames(found.names)
    return replace(names, note=names.note or note)


def _note_of_missing(found: FoundClasses, merged: FoundClasses, path: str) -> str:
    missing = [name for name in merged.names if name not in found.names]
    return f"{path}: the training data lacks these classes: {some_of(missing)}" * bool(missing)


def _names_of_option(labels: tuple[str, ...], known: tuple[str, ...]) -> ClassNames:
    """Return the classes of `--labels`; a model that names the same keeps its own order."""
    counted = () if any(name.isdecimal() for name in labels) else labels
    if not known or _are_free(labels, known):
        return ClassNames(labels, counted)
    if set(labels) == set(known):
        return ClassNames(known, counted)
    raise BadOption(
        f"--labels: the model has classes already, {some_of(known)}; expected these, got "
        f"{some_of(labels)}; or give a model without a classification head"
    )


def _known_names(found: FoundClasses, known: tuple[str, ...], dataset: str) -> ClassNames:
    """Return the classes of a model that names them already, of which the data has some."""
    if set(found.names) <= set(known):
        return ClassNames(known)
    are_countable = found.are_numbers and not any(name.isdecimal() for name in known)
    if are_countable and all(int(name) < len(known) for name in found.names):
        if known == _nameless(len(known)):
            return ClassNames(known, known)
        raise BadDataset(
            f"dataset '{dataset}': its classes are numbers, {some_of(found.names)}, and the model "
            f"has names, {some_of(known)}; expected the names in the order in which the data "
            f"counts them: --labels {','.join(known)}, or another order"
        )
    if _are_free(found.names, known):
        return ClassNames(found.names)
    raise BadDataset(
        f"dataset '{dataset}': its classes are {some_of(found.names)}, and the model has others "
        f"already, {some_of(known)}; use the same names, or a model without a classification head"
    )


def _are_free(names: tuple[str, ...], known: tuple[str, ...]) -> bool:
    """Return whether a model's classes have the names that transformers gives to unnamed ones."""
    return len(names) == len(known) and known == _nameless(len(known))


def _nameless(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(count))
