"""RunSpec and its parts to and from protobuf, checked."""

from __future__ import annotations

from swarm_ft.errors import BadInput, MalformedMessage
from swarm_ft.proto import run_pb2 as pb
from swarm_ft.protocol.spec.checks import bounded, checked_digest, checked_text
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange
from swarm_ft.protocol.spec.run_spec import (
    MAX_HIDDEN_SIZE,
    MAX_VOCAB_SIZE,
    VERSION,
    LrSchedule,
    ModelSpec,
    RunSpec,
    TrainSpec,
)


def layers_to_wire(layers: LayerRange) -> pb.LayerRange:
    """A range of blocks as protobuf."""
    return pb.LayerRange(start=layers.start, stop=layers.stop)


def layers_from_wire(layers: pb.LayerRange) -> LayerRange:
    """A range of blocks from protobuf.

    Raises:
        MalformedMessage: it is empty, reversed or too long.
    """
    bounded("layers' stop", layers.stop, 1, MAX_BLOCKS)
    return LayerRange(bounded("layers' start", layers.start, 0, layers.stop - 1), layers.stop)


def spec_to_wire(spec: RunSpec) -> pb.RunSpec:
    """A RunSpec as protobuf."""
    model, train = spec.model, spec.train
    return pb.RunSpec(
        version=VERSION,
        model=pb.ModelSpec(
            **{name: getattr(model, name) for name in ModelSpec.__dataclass_fields__}
        ),
        train=pb.TrainSpec(
            **{
                name: getattr(train, name)
                for name in TrainSpec.__dataclass_fields__
                if name != "lr_schedule"
            },
            lr_schedule=pb.LrSchedule.Name(train.lr_schedule),
        ),
    )


def spec_from_wire(spec: pb.RunSpec) -> RunSpec:
    """A RunSpec from protobuf.

    Raises:
        MalformedMessage: another version, or any field out of its bounds.
    """
    if spec.version != VERSION:
        raise MalformedMessage(f"RunSpec: expected version {VERSION}, got {spec.version}")
    try:
        return RunSpec(model=_model_from_wire(spec.model), train=_train_from_wire(spec.train))
    except BadInput as error:
        raise MalformedMessage(f"RunSpec: {error.message}") from error


def _model_from_wire(model: pb.ModelSpec) -> ModelSpec:
    num_blocks = bounded("number of blocks", model.num_blocks, 1, MAX_BLOCKS)
    bounded("block digests", len(model.block_digests), num_blocks, num_blocks)
    return ModelSpec(
        reference=model.reference,
        architecture=model.architecture,
        num_blocks=num_blocks,
        hidden_size=bounded("hidden size", model.hidden_size, 1, MAX_HIDDEN_SIZE),
        vocab_size=bounded("vocabulary", model.vocab_size, 1, MAX_VOCAB_SIZE),
        block_bytes=model.block_bytes,
        embed_digest=checked_digest("embeddings' digest", model.embed_digest),
        block_digests=tuple(checked_digest("block digest", d) for d in model.block_digests),
        head_digest=checked_digest("head's digest", model.head_digest),
        tied_embeddings=model.tied_embeddings,
    )


def _train_from_wire(train: pb.TrainSpec) -> TrainSpec:
    return TrainSpec(
        num_samples=train.num_samples,
        seq_length=train.seq_length,
        batch_size=train.batch_size,
        micro_batch_size=train.micro_batch_size,
        num_steps=train.num_steps,
        learning_rate=train.learning_rate,
        lr_schedule=LrSchedule(bounded("learning rate schedule", train.lr_schedule, 1, 3)),
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        clip_grad_norm=train.clip_grad_norm,
        seed=train.seed,
        shuffle=train.shuffle,
        dropout=train.dropout,
        sync_tied_embeddings=train.sync_tied_embeddings,
        # An unknown name ends in the error's message, so it is made fit for logs.
        forward_codec=checked_text(train.forward_codec),
        backward_codec=checked_text(train.backward_codec),
        key_codec=checked_text(train.key_codec),
        dp_codec=checked_text(train.dp_codec),
        save_steps=train.save_steps,
        buffer_bits=train.buffer_bits,
        fill_codec=checked_text(train.fill_codec),
        fill_microbatches=train.fill_microbatches,
    )
