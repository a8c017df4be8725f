"""A client's job as it arrives: one header, then every sample's tokens, all checked."""

from __future__ import annotations

import numpy as np

from swarm_ft.errors import BadDataset, MalformedMessage, OutOfTurn, RunMismatch
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.coordinator_wire import BYTES_PER_TOKEN, tokens_from_wire
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.run_wire import spec_from_wire
from swarm_ft.transport.base import MessageStream

MAX_DATA_BYTES = 4 << 30
"""Token ids of one run; more would let one client fill the coordinator's memory."""


async def receive_submission(
    stream: MessageStream[pb.RunStatus, pb.SubmitPart],
) -> tuple[RunSpec, list[bytes]]:
    """The RunSpec and the tokens of sample 0, 1, ... as little-endian uint32.

    Raises:
        RunMismatch: the client's digest of the RunSpec is not ours.
        BadDataset: samples are missing, too many, or hold ids outside the vocabulary.
        MalformedMessage: a field is out of its bounds.
    """
    first = await stream.receive()
    if first is None or first.WhichOneof("body") != "header":
        raise OutOfTurn(f"{stream.remote}: expected a header as the first message")
    spec = spec_from_wire(first.header.spec)
    if first.header.spec_digest != spec.digest():
        raise RunMismatch(
            f"RunSpec digest: {spec.digest().hex()} here, "
            f"{first.header.spec_digest.hex()} at the client; are the versions the same?"
        )
    total_bytes = spec.train.num_samples * spec.train.seq_length * BYTES_PER_TOKEN
    if total_bytes > MAX_DATA_BYTES:
        raise BadDataset(f"data: {total_bytes} bytes of tokens, {MAX_DATA_BYTES} allowed")
    samples: list[bytes] = []
    while (part := await stream.receive()) is not None:
        samples.append(_sample(part, spec, len(samples)))
    if len(samples) != spec.train.num_samples:
        raise BadDataset(f"data: expected {spec.train.num_samples} samples, got {len(samples)}")
    return spec, samples


def _sample(part: pb.SubmitPart, spec: RunSpec, expected: int) -> bytes:
    if part.WhichOneof("body") != "tokens" or expected >= spec.train.num_samples:
        raise MalformedMessage(f"data: expected {spec.train.num_samples} samples of tokens")
    sample, token_ids = tokens_from_wire(part.tokens)
    if sample != expected:
        raise MalformedMessage(f"data: expected sample {expected}, got sample {sample}")
    if len(token_ids) != spec.train.seq_length * BYTES_PER_TOKEN:
        num_tokens = len(token_ids) // BYTES_PER_TOKEN
        raise BadDataset(
            f"sample {sample}: expected {spec.train.seq_length} tokens, got {num_tokens}"
        )
    largest = int(np.frombuffer(token_ids, dtype="<u4").max())
    if largest >= spec.model.vocab_size:
        raise BadDataset(
            f"sample {sample}: token id {largest} is outside the model's vocabulary of "
            f"{spec.model.vocab_size}; does the tokenizer belong to the model?"
        )
    return token_ids
