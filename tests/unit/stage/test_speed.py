"""The speed at which this machine trains a block is a plausible number."""

import torch

from swarm_ft.protocol.spec.flops import block_flops
from swarm_ft.stage.speed import training_flops_per_s


def test_a_block_takes_six_operations_a_weight_and_token_and_some_for_attention() -> None:
    assert block_flops(1000, 8, tokens=20, seq_length=10) == 20 * (6000 + 12 * 10 * 8)


def test_this_machine_trains_at_more_than_nothing_in_either_type() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e7 < training_flops_per_s(torch.device("cpu"), dtype) < 1e16
