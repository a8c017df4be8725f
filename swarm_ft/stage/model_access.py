"""The models that a peer opens for jobs, and what a client learns if it opens none.

A client chooses the reference in its job, so that the reference is hostile input. It leads to a
directory below those that the peer's owner named, to a public repository of the hub, or nowhere. A
client learns which part of a model differs. Paths, shapes, digests and library messages go to the
peer's own log, and a missing, a forbidden and an unreadable model give the same error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.base.log import get_logger
from swarm_ft.errors import (
    BadInput,
    BadLayers,
    ModelDiffers,
    ModelNotAllowed,
    ModelUnavailable,
    NonFiniteWeights,
    SwarmError,
    UnsupportedDtype,
)
from swarm_ft.protocol.spec.run_spec import ModelSpec, RunSpec
from swarm_ft.protocol.spec.tasks import task_of
from swarm_ft.stage.names import check_allowed_models, check_model_folders, is_hub_id
from swarm_ft.stage.source import Source

if TYPE_CHECKING:
    from swarm_ft.stage.checkpoint import Checkpoint

logger = get_logger(__name__)

UNAVAILABLE = (
    "the model is not available at this peer: expected a directory below one of its --models, or "
    "a public hub id for which it has room (--model-disk); the peer's log has the reason"
)
NOT_ALLOWED = "this peer does not allow this model"
CLIENT_VISIBLE_ERRORS = (
    BadLayers,
    ModelDiffers,
    ModelNotAllowed,
    ModelUnavailable,
    NonFiniteWeights,
    UnsupportedDtype,
)
"""Errors whose messages depend on the job alone, or on weights that matched the job's digests."""

OpenFromHub = Callable[[ModelSpec], Source]
"""Function that finds the public repository of a run's model, within the owner's limits."""


def refusal_of(error: BadInput) -> BadInput:
    """Return the error that a client may see, for one from opening or loading a model."""
    if isinstance(error, CLIENT_VISIBLE_ERRORS):
        return error
    return ModelUnavailable(UNAVAILABLE, private=error.private or error.message)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAccess:
    """The owner's settings for models.

    Attributes:
        directories: Directories below which models of jobs may lie, see `named_directories`.
        own: Directory or hub id that replaces every job's model, opened with the owner's own
            rights; None: the job's reference counts.
        allowed: Hub ids that jobs may name, as `org/name`, `name` or `org/*`; empty: all.
        hub: Opens a public repository; None: models of jobs never come from the hub.
    """

    directories: tuple[Path, ...] = ()
    own: str | None = None
    allowed: tuple[str, ...] = ()
    hub: OpenFromHub | None = None

    def __post_init__(self) -> None:
        check_allowed_models(self.allowed)

    def open(self, spec: RunSpec) -> Checkpoint:
        """Open a run's model and compare its config with the run's, without reading weights.

        Raises:
            ModelUnavailable: The model cannot be used; `private` has the reason.
            ModelNotAllowed: The model is a hub id that the owner does not allow.
            ModelDiffers: The config is not the run's.
        """
        try:
            checkpoint = self._opened(spec)
            checkpoint.check_config(spec.model)
        except ModelDiffers:
            raise
        except BadInput as error:
            raise self._refused(spec.model.reference, error.private or error.message) from error
        except (
            OSError,
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            # A model of a client's choice may cause any error in a library, and its text must not
            # reach the client.
            logger.exception("model '%s': it cannot be opened", spec.model.reference)
            raise self._refused(spec.model.reference, str(error)) from error
        return checkpoint

    def _opened(self, spec: RunSpec) -> Checkpoint:
        # The import of transformers' models takes seconds, and a peer without a run does not need
        # it.
        from swarm_ft.stage.checkpoint import (
            check_main_settings,
            checkpoint_at,
            open_checkpoint,
            read_config,
        )

        if self.own is not None:
            return open_checkpoint(self.own, spec.train)
        source = self._source(spec.model)
        # The check precedes `checkpoint_at`, which fetches the single file of a small model.
        config = read_config(source, task_of(spec.train))
        check_main_settings(config, spec.model, source.reference)
        return checkpoint_at(source, spec.train)

    def _source(self, model: ModelSpec) -> Source:
        """Return the source of the model.

        Raises:
            ModelUnavailable, ModelNotAllowed: The job may not name this model.
        """
        directory = self.find(model.reference)
        if directory is not None:
            return ConfinedSource(reference=str(directory), roots=self.directories)
        if self.hub is None or not is_hub_id(model.reference) or not self.allows(model.reference):
            raise ModelUnavailable(
                UNAVAILABLE,
                private=f"model '{model.reference}': lies below no directory that --models names, "
                "and is no hub id that --allow-models allows",
            )
        return self.hub(model)

    def find(self, reference: str) -> Path | None:
        """Return the real path of a directory that a job may name; None if there is none.

        Paths outside of the owner's directories are refused by their text alone, without a look at
        them.
        """
        if "\0" in reference or os.pardir in Path(reference).parts:
            return None
        named = Path(reference)
        for root in self.directories:
            path = named if named.is_absolute() else root / named
            if path.is_relative_to(root) and (real := self._real(path)) is not None:
                return real
        return None

    def _real(self, path: Path) -> Path | None:
        try:
            real = path.resolve(strict=True)
            return real if _is_below(real, self.directories) and real.is_dir() else None
        except (OSError, RuntimeError):
            return None

    def allows(self, hub_id: str) -> bool:
        """Whether the owner allows a hub id."""
        organisation = hub_id.partition("/")[0] if "/" in hub_id else ""
        return not self.allowed or hub_id in self.allowed or f"{organisation}/*" in self.allowed

    def _refused(self, reference: str, why: str) -> SwarmError:
        """Return the same error for any reason: it depends on the reference's text alone."""
        if self.own is None and is_hub_id(reference) and not self.allows(reference):
            return ModelNotAllowed(NOT_ALLOWED, private=why)
        return ModelUnavailable(UNAVAILABLE, private=why)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfinedSource(Source):
    """A directory of a job, whose files must lie below the owner's directories too.

    Attributes:
        roots: Directories of the owner.
    """

    roots: tuple[Path, ...]

    def _fetch(self, file_name: str) -> Path | None:
        path = Path(self.reference) / file_name
        if not path.exists():
            return None
        if not _is_below(path.resolve(strict=True), self.roots):
            raise OSError(f"{file_name} is a link that leads out of the directories of --models")
        return path


def _is_below(real: Path, roots: Sequence[Path]) -> bool:
    return any(real.is_relative_to(root) for root in roots)


def named_directories(named: Sequence[str | Path]) -> tuple[Path, ...]:
    """Return the absolute paths of an owner's directories, as written and resolved.

    A job may use either path. Only a resolved path can lie below a resolved one, so that a symbolic
    link allows no more than its target.

    Raises:
        BadOption: A path is no directory.
    """
    check_model_folders(named)
    paths = [path for one in named for path in (Path(one).resolve(), Path(one).absolute())]
    return tuple(dict.fromkeys(paths))
