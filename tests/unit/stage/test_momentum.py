"""Replicas that sum shares of the first moment: `--dp momentum`."""

import pytest
import torch

from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.protocol.spec.codec_spec import parse_reduction_spec
from swarm_ft.protocol.spec.training_plan import step_microbatches
from swarm_ft.stage.momentum import BETA1, BETA2, gradient_from_momentum, momentum_share

N = 700
SPREADS = torch.logspace(-4, 0, N)
"""Of gradients, which differ by orders of magnitude."""


class Member:
    """One replica of a parameter of N values: torch's AdamW, and its residual."""

    def __init__(self):
        self.weights = torch.nn.Parameter(torch.ones(N))
        self.optimizer = torch.optim.AdamW([self.weights], lr=1e-2, betas=(BETA1, BETA2))
        self.owed = None

    @property
    def momentum(self):
        state = self.optimizer.state.get(self.weights)
        return torch.zeros(N) if state is None else state["exp_avg"]

    def apply(self, gradient):
        self.weights.grad = gradient.clone()
        self.optimizer.step()


class Replicas:
    """Members that sum shares of their moments, with error feedback at both ends."""

    def __init__(self, count, codec):
        self.codec = PieceCodec(parse_reduction_spec(codec).codec)
        self.members = [Member() for _ in range(count)]
        self.owed = None

    def step(self, gradients):
        total = torch.zeros(N)
        for member, gradient in zip(self.members, gradients, strict=True):
            share = momentum_share(member.momentum, gradient, len(self.members))
            piece = self.codec.encode(share, member.owed)
            member.owed = piece.residual
            total += piece.values
        piece = self.codec.encode(total, self.owed)
        self.owed = piece.residual
        for member in self.members:
            member.apply(gradient_from_momentum(piece.values, member.momentum))
        return piece.values


def drawn(count, steps, scale=1.0):
    """Gradients [steps, members, N] of these spreads times `scale`."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(steps, count, N, generator=generator) * SPREADS * scale


@pytest.mark.parametrize("count", [2, 3])
def test_uncompressed_it_is_torchs_adamw_of_the_summed_gradients(count):
    alone, replicas = Member(), Replicas(count, "momentum:none")
    for gradients in drawn(count, 40):
        alone.apply(gradients.sum(0))
        replicas.step(gradients)
    one = replicas.members[0]
    difference = (one.momentum - alone.momentum) / SPREADS
    assert difference.abs().max() < 1e-5
    torch.testing.assert_close(one.weights, alone.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", ["momentum", "momentum:q4", "momentum:q4+z"])
def test_compressed_all_replicas_hold_the_same_bits_and_the_decoded_moment(codec):
    replicas = Replicas(3, codec)
    for gradients in drawn(3, 12):
        decoded = replicas.step(gradients)
    for member in replicas.members:
        assert torch.equal(member.weights, replicas.members[0].weights)
        scale = decoded.abs().max().item()
        torch.testing.assert_close(member.momentum, decoded, rtol=1e-5, atol=1e-6 * scale)


def test_error_feedback_makes_good_what_single_steps_lack():
    """In the sum over all steps, which is what weights are moved by."""
    exact, replicas = torch.zeros(N), Replicas(2, "momentum:q4")
    summed, summed_exactly = torch.zeros(N), torch.zeros(N)
    steady = drawn(2, 1)[0]
    for _ in range(60):
        exact = BETA1 * exact + (1 - BETA1) * steady.sum(0)
        summed_exactly += exact
        summed += replicas.step(steady)
    assert (summed - summed_exactly).norm() < 0.02 * summed_exactly.norm()


def test_gradients_of_1e_minus_30_are_neither_lost_nor_infinite():
    replicas = Replicas(2, "momentum:q4")
    steady = drawn(2, 1, scale=1e-30)[0]
    for _ in range(60):
        replicas.step(steady)
    momentum = replicas.members[0].momentum * 1e30
    assert (momentum - steady.sum(0) * 1e30).norm() < 0.3 * (steady.sum(0) * 1e30).norm()
    assert bool(torch.isfinite(replicas.members[0].weights).all())
    assert bool(torch.isfinite(replicas.owed).all())
    assert bool(replicas.owed.any())


# ---- stages


def halves(pipelines, step, samples):
    """A step's gradients, one microbatch at each pipeline."""
    train = pipelines[0].spec.train
    batches = step_microbatches(train, step)
    num_targets = sum(len(b.samples) for b in batches) * (train.seq_length - 1)
    for pipeline, batch in zip(pipelines, batches, strict=True):
        for stage in pipeline.stages:
            stage.begin_step(step, num_targets)
        pipeline.microbatch(batch.index, samples[list(batch.samples)])


def own_share(pipeline):
    """Of one replica of two, at the first stage."""
    stage = pipeline.stages[0]
    return stage.share(stage.flat_gradient(), 2)


def exchange(pipelines, stages):
    for index in stages:
        replicas = [pipeline.stages[index] for pipeline in pipelines]
        total = sum(stage.share(stage.flat_gradient(), len(replicas)) for stage in replicas)
        for stage in replicas:
            stage.take_sum(total)


def values(stage, part):
    """The weights, or the moments of that part of the state, one after the other."""
    state = stage.state()
    return torch.cat([state[part + n].flatten() for n in sorted(state) if "adamw/" not in n])


@pytest.mark.parametrize(
    ("name", "tied"), [("gpt2-tied", False), ("gpt2-tied", True), ("llama", False)]
)
def test_replicas_that_sum_moments_train_as_one_peer_does(make_pipeline, samples, name, tied):
    changes = {"sync_tied_embeddings": tied, "clip_grad_norm": 0.5}
    one = make_pipeline(name, 2, **changes)
    left, right = (make_pipeline(name, 2, dp_codec="momentum:none", **changes) for _ in range(2))
    for step in range(5):
        one.gradients(step, samples)
        if len(step_microbatches(one.spec.train, step)) == 2:
            halves((left, right), step, samples)
            exchange((left, right), (0, 1))
        else:
            left.gradients(step, samples)
            right.gradients(step, samples)
        for pipeline in (one, left, right):
            pipeline.commit(step)
        assert left.digests() == right.digests()
        assert left.grad_norms[-1] == pytest.approx(one.grad_norms[-1], rel=1e-4)
    assert one.grad_norms[-1] > 0.5  # so they were clipped
    for mine, whole in zip(left.stages, one.stages, strict=True):
        # Some gradients of attention's biases are rounding alone, so not every value can agree.
        for part in ("", "adamw/exp_avg/", "adamw/exp_avg_sq/"):
            expected = values(whole, part)
            assert (values(mine, part) - expected).norm() < 1e-4 * expected.norm()


@pytest.fixture
def trained(make_pipeline, samples):
    """One stage of two replicas after two steps."""
    pipelines = [make_pipeline("gpt2-tied", 1, dp_codec="momentum:none") for _ in range(2)]
    for step in range(2):
        halves(pipelines, step, samples)
        exchange(pipelines, [0])
        for pipeline in pipelines:
            pipeline.commit(step)
    return pipelines


def test_a_step_that_is_redone_gives_the_same_share(trained, samples, make_pipeline):
    step = 0  # of full size; its number does not matter here
    halves(trained, step, samples)
    first = [own_share(pipeline) for pipeline in trained]
    exchange(trained, [0])
    halves(trained, step, samples)
    again = [own_share(pipeline) for pipeline in trained]
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_who_takes_up_a_stages_state_gives_the_same_share(trained, samples, make_pipeline):
    newcomer = make_pipeline("gpt2-tied", 1, dp_codec="momentum:none")
    newcomer.stages[0].load_state(trained[1].stages[0].state())
    halves(trained, 0, samples)
    halves((trained[0], newcomer), 0, samples)
    assert torch.equal(own_share(newcomer), own_share(trained[1]))


def test_before_the_first_step_a_share_is_of_the_gradient_alone(make_pipeline, samples):
    plain, other = (make_pipeline("llama", 1, dp_codec=dp) for dp in ("none", "momentum"))
    for pipeline in (plain, other):
        pipeline.gradients(0, samples)
    gradient = own_share(plain)
    torch.testing.assert_close(own_share(other), gradient * (1 - BETA1))
