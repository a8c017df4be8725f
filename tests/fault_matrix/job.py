"""The job that every trial's run does: small, exact, and long enough to be hit in any phase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm_ft.client.demo_input import DemoInput, write_demo_input
from swarm_ft.client.job import Job, prepare_job
from swarm_ft.client.options import EvalOptions, JobOptions, Outputs
from swarm_ft.protocol.spec.options import arguments
from swarm_ft.protocol.spec.run_spec import Adapter, LrSchedule, TrainOptions

NUM_LAYERS = 3
HIDDEN_SIZE = 192
"""A stage with its optimizer's state is two chunks of a shard: two sources give one each."""
SEQ_LENGTH = 256
"""A frame of 196 kB is more than HTTP/2 sends without an answer: it can be cut."""
BATCH_SIZE, MICRO_BATCH_SIZE = 8, 1
SAVE_STEPS = 4
LEARNING_RATE = 1e-3
NO_CODEC = "none"


@dataclass(frozen=True, slots=True)
class Material:
    """The model and the data of a job.

    Attributes:
        sample: a model of three layers, and text.
        adapter: that trains in place of the model's weights.
    """

    sample: DemoInput
    adapter: Adapter


def make_material(work_dir: Path, adapter: Adapter = Adapter.NONE) -> Material:
    """Written anew."""
    directory = work_dir / "input"
    sample = write_demo_input(
        directory, seed=1, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE, vocab_size=300
    )
    return Material(sample, adapter)


def make_job(material: Material, work_dir: Path) -> Job:
    """The job, to be submitted from this process; its steps are for the trial to set."""
    return prepare_job(_options(material, num_steps=1, out=work_dir / "unused"))


def train_arguments(material: Material, num_steps: int, out: Path) -> list[str]:
    """The same job for `swarm-ft client train`."""
    return arguments(_options(material, num_steps, out))


def _options(material: Material, num_steps: int, out: Path) -> JobOptions:
    return JobOptions(
        model=material.sample.model_dir,
        dataset=material.sample.train_file,
        evaluation=EvalOptions(max_eval_samples=1),
        steps=num_steps,
        train=TrainOptions(
            batch_size=BATCH_SIZE,
            micro_batch_size=MICRO_BATCH_SIZE,
            seq_length=SEQ_LENGTH,
            learning_rate=LEARNING_RATE,
            lr_schedule=LrSchedule.CONSTANT,
            forward_codec=NO_CODEC,
            backward_codec=NO_CODEC,
            key_codec=NO_CODEC,
            save_steps=SAVE_STEPS,
            adapter=material.adapter,
        ),
        outputs=Outputs(out=out),
    )
