"""Tokens are drawn from what transformers' own `generate` would draw them from."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from swarm_ft.protocol.spec.sampling import Sampling
from swarm_ft.stage.sampling import choose

LOGITS = torch.tensor([1.0, 3.0, 2.5, -1.0, 2.9, 0.0])
NUM_DRAWN = 4000


def drawn(sampling: Sampling) -> Counter[int]:
    return Counter(choose(LOGITS, sampling, place) for place in range(NUM_DRAWN))


def test_without_sampling_it_is_the_likeliest() -> None:
    assert choose(LOGITS, None, 5) == 1


def test_what_is_drawn_depends_on_seed_and_place_alone() -> None:
    one = [choose(LOGITS, Sampling(seed=1), place) for place in range(50)]
    torch.rand(7)  # whatever else draws
    assert one == [choose(LOGITS, Sampling(seed=1), place) for place in range(50)]
    assert one != [choose(LOGITS, Sampling(seed=2), place) for place in range(50)]
    assert len(set(one)) > 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=0),
        Sampling(top_k=3),
        Sampling(top_p=0.6),
        Sampling(temperature=1.5, top_k=4, top_p=0.8),
    ],
)
@pytest.mark.sampled(3)
def test_shares_are_those_of_transformers(sampling: Sampling) -> None:
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=len(LOGITS), n_positions=4, n_embd=8, n_layer=1, n_head=1)
    )
    generated = model.generate(
        torch.zeros(1, 1, dtype=torch.int64),
        max_new_tokens=1,
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=[lambda _ids, _scores: LOGITS[None].clone()],
        output_scores=True,
        return_dict_in_generate=True,
    )
    shares = generated.scores[0].softmax(-1)[0]
    counts = drawn(sampling)
    assert set(counts) <= {token for token, share in enumerate(shares.tolist()) if share}
    for token, share in enumerate(shares.tolist()):
        assert counts[token] / NUM_DRAWN == pytest.approx(share, abs=0.03)
