"""Stages of a model in this process, with a swarm's codecs in between, for the caller's loop.

Engines and codecs are those of a swarm, but the caller's loop decides on batches and steps. A
client cannot drive a swarm of other machines like this: the coordinator plans whole jobs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swarm_ft.api.keyword_errors import keyword_errors
from swarm_ft.client.export import assemble
from swarm_ft.client.result import write_result_files
from swarm_ft.codec.batches import CompressedBoundary
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import BadOption, BadSnapshot, MalformedMessage, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import split_evenly
from swarm_ft.protocol.spec.options import build, by_names
from swarm_ft.protocol.spec.run_spec import MAX_STEPS, RunSpec, TrainOptions, TrainSpec
from swarm_ft.protocol.spec.sample_rows import NO_LABEL
from swarm_ft.protocol.spec.training_plan import clip_factor
from swarm_ft.stage.adapters import WEIGHTS_FILE, with_adapters
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.device import pick_device
from swarm_ft.stage.engine import StageEngine


class LocalPipeline:
    """A pipeline for a custom loop: forward_backward, optim_step, save_state, load_state.

        pipeline = swarm_ft.LocalPipeline("gpt2", stages=2, seq_length=64)
        for ids, tokens in batches:
            loss = pipeline.forward_backward(tokens, sample_ids=ids)
            pipeline.optim_step(learning_rate=1e-4)

    Args:
        model: Directory or hub id of the model.
        stages: Number of stages of the pipeline.
        device: Device of all stages: auto, cpu, cuda, cuda:N or mps.
        options: Training options of a job (`seq_length`, `forward_codec`, `adapter`,
            `clip_grad_norm`, ...), by their names with underscores.

    Attributes:
        steps: Number of optimizer steps so far.

    Raises:
        BadInput: The model or an option is not usable.
    """

    @keyword_errors()
    def __init__(
        self, model: str, *, stages: int = 2, device: str = "auto", **options: Any
    ) -> None:
        train = build(TrainOptions, by_names(TrainOptions, options))
        if train.has_classes:
            raise BadOption("--task: expected causal-lm in a LocalPipeline")
        self._checkpoint = open_checkpoint(model, train)
        forever = TrainSpec.of(train, num_samples=1, num_steps=MAX_STEPS)
        spec = RunSpec(model=self._checkpoint.describe(), train=forever)
        self._spec = with_adapters(self._checkpoint, spec)
        on = pick_device(device)
        self._engines = [
            StageEngine(self._checkpoint, self._spec, layers, device=on, dtype=torch.float32)
            for layers in split_evenly(self._spec.model.layers, stages)
        ]
        for engine in self._engines:
            engine.load()
        self._new_boundaries()
        self.steps = 0
        self._begin()

    @property
    def boundaries(self) -> tuple[CompressedBoundary, ...]:
        """The boundaries between stages, first to last. Each counts its bytes."""
        return tuple(self._boundaries)

    def forward_backward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        sample_ids: Sequence[int] | None = None,
    ) -> float:
        """Add a batch's gradients to those of the step; a step may have many batches.

        Args:
            input_ids: Tokens, int64 [samples, tokens].
            labels: Labels of the same shape: the id of each learned token, and -100 for the
                others; None: all tokens are learned.
            sample_ids: Number of each sample, the same at every visit. Codecs that remember
                samples, such as aq3+z, need it.

        Returns:
            The batch's loss: the mean over its targets, in nats.

        Raises:
            BadOption: The codecs need `sample_ids`.
            MalformedMessage: The tensors are no batch, or have no targets.
            NonFinite: The model diverged.
        """
        ids = self._checked_ids(sample_ids, len(input_ids))
        labels = input_ids.clone() if labels is None else labels.clone()
        labels[:, 0] = NO_LABEL  # The first token has no predecessor to predict it from.
        num_targets = int((labels != NO_LABEL).sum())
        if not num_targets:
            raise MalformedMessage("labels: expected 1 target or more, got none")
        microbatch = MicrobatchIndex(self._batches)
        x, last = input_ids, self._engines[-1]
        for engine, boundary in zip(self._engines, self._boundaries, strict=False):
            x = boundary.transfer(engine.forward(microbatch, x), ids, Direction.FORWARD)
        found = last.forward_backward(microbatch, x, labels)
        last.weight_gradients(microbatch)
        self._back(microbatch, found.input_gradient, ids)
        self._batches += 1
        self._targets += num_targets
        return found.loss_sum / num_targets

    def _back(self, microbatch: MicrobatchIndex, gradient: Tensor | None, ids: list[int]) -> None:
        below = zip(self._engines[-2::-1], self._boundaries[::-1], strict=False)
        for engine, boundary in below:
            if gradient is not None:
                passed = boundary.transfer(gradient, ids, Direction.BACKWARD)
                gradient = engine.backward(microbatch, passed)
            engine.weight_gradients(microbatch)

    def optim_step(self, learning_rate: float | None = None) -> float:
        """Update the weights with the gradients of all batches since the last step.

        The step's loss is the mean over the targets of all its batches.

        Args:
            learning_rate: Learning rate of this step; None: that of the options.

        Returns:
            The gradient's norm before clipping.

        Raises:
            OutOfTurn: The step has no batch.
            NonFinite: A gradient is inf or NaN.
        """
        if not self._batches:
            raise OutOfTurn("optim_step: expected a forward_backward before it")
        sharing = self._spec.sharing(self._engines)
        if sharing:
            total = torch.stack([engine.shared_gradient() for engine in sharing]).sum(0)
            for engine in sharing:
                engine.set_shared_gradient(total)
        squares = sum(engine.squared_grad_norm() for engine in self._engines)
        norm = math.sqrt(squares) / self._targets
        factor = clip_factor(self._spec.train, norm) / self._targets
        rate = self._spec.train.learning_rate if learning_rate is None else learning_rate
        for engine in self._engines:
            engine.apply(factor, rate)
        self.steps += 1
        self._begin()
        return norm

    def save_state(self, path: str | Path) -> None:
        """Write weights, the optimizer's state and the number of steps to a file.

        The file has no sample buffers, so after `load_state` each sample starts with a key frame.

        Raises:
            OutOfTurn: The present step has batches.
        """
        if self._batches:
            raise OutOfTurn("save_state: expected no batches in the present step; call optim_step")
        tensors = {
            f"{number}/{name}": tensor.contiguous()
            for number, engine in enumerate(self._engines)
            for name, tensor in engine.state().items()
        }
        header = {"steps": self.steps, "spec": self._spec.digest().hex(), "stages": self._cut()}
        save_file(tensors, path, metadata={"swarm_ft": json.dumps(header)})

    def load_state(self, path: str | Path) -> None:
        """Load a file of `save_state`, and drop the gradients of the present step.

        Raises:
            BadSnapshot: The file has another model, other options or other stages.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("swarm_ft", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise BadSnapshot(f"{path}: expected a saved state: {error}") from None
        expected = self._spec.digest().hex(), self._cut()
        if (header.get("spec"), header.get("stages")) != expected:
            raise BadSnapshot(
                f"{path}: expected this model with these options and stages, got another state"
            )
        for number, engine in enumerate(self._engines):
            start = f"{number}/"
            engine.load_state(
                {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
            )
        self.steps = int(header["steps"])
        self._new_boundaries()
        self._begin()

    def save_model(self, out: str | Path) -> None:
        """Write the trained model or adapter, for `from_pretrained` of transformers or peft.

        Raises:
            BadOption: The directory is not usable.
        """
        write = partial(write_result_files, checkpoint=self._checkpoint, spec=self._spec)
        with TemporaryDirectory(prefix="swarm-ft-") as folder:
            shards = []
            for number, engine in enumerate(self._engines):
                shards.append(Path(folder) / f"{number}.safetensors")
                with shards[-1].open("wb") as file:
                    file.writelines(engine.export())
            as_one = WEIGHTS_FILE if self._spec.train.gives_adapter else None
            assemble(Path(out), shards, write, as_one=as_one)

    def _new_boundaries(self) -> None:
        train = self._spec.train
        self._boundaries = [
            CompressedBoundary(
                train.forward_codec,
                train.backward_codec,
                key=train.key_codec,
                buffer_bits=train.buffer_bits,
            )
            for _ in self._engines[1:]
        ]

    def _begin(self) -> None:
        self._batches, self._targets = 0, 0
        for engine in self._engines:
            # Gradients are sums until the step's end, since its number of targets is unknown.
            engine.begin_step(StepNumber(self.steps), 1)

    def _checked_ids(self, sample_ids: Sequence[int] | None, count: int) -> list[int]:
        if sample_ids is not None:
            return [int(one) for one in sample_ids]
        train = self._spec.train
        texts = {
            Direction.FORWARD: ("forward_codec", train.forward_codec),
            Direction.BACKWARD: ("backward_codec", train.backward_codec),
        }
        for way, (option, text) in texts.items():
            codec = train.codec(way)
            if self._boundaries and (codec.is_delta or codec.has_residual):
                raise BadOption(
                    f"forward_backward: pass sample_ids=[...], a number for each of the {count} "
                    f"samples ({text} remembers each sample); or {option}='q8', which needs none"
                )
        return list(range(count))

    def _cut(self) -> list[str]:
        return [str(engine.layers) for engine in self._engines]
