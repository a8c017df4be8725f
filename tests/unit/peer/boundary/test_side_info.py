"""A stage's boundaries learn bases from committed steps alone, in any order of frames."""

import itertools
import threading
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarm_ft.codec import Codec, codebook, directional
from swarm_ft.codec import side_info as codec_side_info
from swarm_ft.codec.basis import Basis, learn_basis
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.side_info import Learning, SideInfo
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.errors import BadFrame
from swarm_ft.ids import BlockIndex, SampleId
from swarm_ft.peer.boundary import side_info as side_info_module
from swarm_ft.peer.boundary.side_info import SideInfoKey, SideInfoStore, TensorKind, boundary_of
from tests.codecs import parse

CHANNELS, TOKENS = 16, 12
FIRST, CHANGE, GRADIENT = (SideInfoKey(BlockIndex(2), kind) for kind in TensorKind)
STEP_SIZE = 0.2


class SteadyCodec(DirectionalCodec):
    """A codec whose step does not follow the tensor."""

    def step_of(self, x: Tensor) -> float:
        return STEP_SIZE


CODECS: dict[SideInfoKey, Codec] = {
    FIRST: SteadyCodec(parse_codec_spec("qk1", Direction.FORWARD)),
    CHANGE: SteadyCodec(parse_codec_spec("aqk1", Direction.FORWARD)),
    GRADIENT: parse("q2+z+book", Direction.BACKWARD),
}


def rows_of(sample: int, seed: int = 0) -> Tensor:
    """Along three directions that are the seed's."""
    generator = torch.Generator().manual_seed(1000 * seed)
    directions = torch.randn(3, CHANNELS, generator=generator)
    generator.manual_seed(1000 * seed + sample + 1)
    return torch.randn(TOKENS, 3, generator=generator) @ directions


def note(
    bases: SideInfoStore, samples: Iterable[int], seed: int = 0, key: SideInfoKey = CHANGE
) -> None:
    for sample in samples:
        x = rows_of(sample, seed)
        base = None if key.kind is TensorKind.FIRST else torch.zeros_like(x)
        bases.record_frame(key, SampleId(sample), CODECS[key], x, base)


def latest(bases: SideInfoStore, key: SideInfoKey) -> SideInfo | None:
    """The one that was made last, in use or coming."""
    bases.get(key)
    return bases.next_info(key) or bases.cached(key)


def name(bases: SideInfoStore, key: SideInfoKey = CHANGE) -> bytes:
    basis = latest(bases, key)
    assert basis is not None
    return basis.name


def in_use(bases: SideInfoStore, key: SideInfoKey = CHANGE) -> bytes:
    basis = bases.get(key)
    assert basis is not None
    return basis.name


def learned_of(samples: Iterable[int], seed: int = 0, key: SideInfoKey = CHANGE) -> SideInfoStore:
    bases = SideInfoStore()
    note(bases, samples, seed, key)
    bases.commit()
    return bases


def learn_slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Return an event for the begin of learning, and one that lets it end."""
    is_learning, may_end = threading.Event(), threading.Event()

    def slow(*args: object, **kwargs: object) -> Basis | None:
        is_learning.set()
        may_end.wait()
        return learn_basis(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(directional, "learn_basis", slow)
    return is_learning, may_end


# ---- when one is made


def steps_that_make_one(num_steps: int, key: SideInfoKey = CHANGE) -> list[int]:
    """Return the steps after which the basis is another, if all their frames differ."""
    bases, made, last = SideInfoStore(), [], b""
    for step in range(num_steps):
        note(bases, (0, 1), seed=step, key=key)
        bases.commit()
        if name(bases, key) != last:
            made.append(step)
        last = name(bases, key)
    return made


def test_bases_are_made_often_at_first_and_then_after_so_many_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directional, "_LEARNING_OF_CHANGES", Learning(tokens_a_channel=30))
    made = steps_that_make_one(60)
    assert made[:5] == [0, 1, 3, 7, 15]
    gaps = {later - sooner for sooner, later in itertools.pairwise(made[5:])}
    assert len(gaps) == 1
    assert gaps.pop() * 2 * TOKENS >= 30 * CHANNELS


def test_a_codebook_is_made_seldomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of gradients of several steps, of which one has too few."""
    often = replace(codebook._LEARNING, tokens_a_channel=30)  # noqa: SLF001
    monkeypatch.setattr(codebook, "_LEARNING", often)
    bases, made, last = SideInfoStore(), [], b""
    for step in range(60):
        note(bases, (0, 1), seed=step, key=GRADIENT)
        bases.commit()
        basis = latest(bases, GRADIENT)
        if basis is not None and basis.name != last:
            made.append(step)
            last = basis.name
    # Two steps have 48 rows, which are too few; a fourth step's are too few for another.
    assert made[:2] == [2, 15]
    gaps = {later - sooner for sooner, later in itertools.pairwise(made[1:])}
    assert gaps == {21}, "30 tokens for each of 16 channels, of which a step has 24"


def gathered(bases: SideInfoStore) -> Tensor:
    return bases.export()[f"{GRADIENT}/rows"]


def test_rows_are_gathered_until_they_are_enough_and_no_more_of_them_than_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bases = learned_of((0, 1), key=GRADIENT)
    assert bases.get(GRADIENT) is None
    assert len(gathered(bases)) == 2 * TOKENS
    note(bases, range(6), seed=1, key=GRADIENT)
    bases.commit()
    assert bases.get(GRADIENT) is not None
    assert f"{GRADIENT}/rows" not in bases.export()
    monkeypatch.setattr(side_info_module, "MAX_GATHERED_ROWS", 3 * TOKENS)
    for step in range(2, 9):
        note(bases, (0, 1), seed=step, key=GRADIENT)
        bases.commit()
    assert len(gathered(bases)) == 3 * TOKENS


def test_tokens_without_a_gradient_do_not_make_enough() -> None:
    bases = SideInfoStore()
    for step in range(1, 8):
        x = rows_of(0, seed=step)
        x[:2] = 0
        bases.record_frame(GRADIENT, SampleId(0), CODECS[GRADIENT], x, None)
        bases.commit()
        assert (bases.get(GRADIENT) is not None) == (step == 7), "10 tokens a step; 64 are enough"


def test_a_rolled_back_step_gathers_nothing_and_order_does_not_matter() -> None:
    quiet, redone = SideInfoStore(), SideInfoStore()
    for step in range(3):
        note(redone, (4, 1), seed=70 + step, key=GRADIENT)
        redone.rollback()
        note(redone, (1, 0, 2), seed=step, key=GRADIENT)
        note(quiet, (0, 1, 2), seed=step, key=GRADIENT)
        for bases in (quiet, redone):
            bases.commit()
    assert name(quiet, GRADIENT) == name(redone, GRADIENT)


def test_steps_without_frames_of_a_kind_do_not_count() -> None:
    bases = learned_of((0, 1))
    for step in range(1, 6):  # none of changes
        note(bases, (0, 1), seed=step, key=FIRST)
        bases.commit()
    before = name(bases)
    note(bases, (0, 1), seed=9)
    bases.commit()
    assert name(bases) != before, "the second of its kind"


def test_there_is_none_before_a_step_was_committed() -> None:
    bases = SideInfoStore()
    assert bases.get(CHANGE) is None
    note(bases, (0, 1))
    assert bases.get(CHANGE) is None
    bases.commit()
    assert bases.get(CHANGE) is not None
    assert bases.get(FIRST) is None
    assert bases.get(SideInfoKey(BlockIndex(3), TensorKind.CHANGE)) is None


def test_the_first_is_used_at_once_and_later_ones_a_step_later() -> None:
    bases = learned_of((0, 1))
    first = in_use(bases)
    assert bases.first_used(CHANGE) is bases.get(CHANGE)
    assert bases.next_info(CHANGE) is None
    note(bases, (0, 1), seed=1)
    bases.commit()  # the second of its kind, which makes one
    assert in_use(bases) == first
    assert bases.first_used(CHANGE) is None, "said already"
    second = bases.next_info(CHANGE)
    assert second is not None
    assert second.name != first
    note(bases, (0, 1), seed=2)
    bases.rollback()
    assert in_use(bases) == first, "the step is redone"
    note(bases, (0, 1), seed=2)
    bases.commit()
    assert bases.get(CHANGE) is bases.first_used(CHANGE) is second
    assert bases.next_info(CHANGE) is None


def test_a_commit_that_changes_nothing_is_known_for_one() -> None:
    bases = SideInfoStore()
    assert not bases.has_changes
    for step, changes in enumerate((True, True, True, True, False)):
        if step < 2:  # both make one: a step later the second is in use, and then no longer new
            note(bases, (0, 1), seed=step)
        assert bases.has_changes == changes
        bases.commit()


def test_one_that_nobody_asked_for_takes_its_place_all_the_same() -> None:
    requested, quiet = learned_of((0, 1)), learned_of((0, 1))
    for step in range(1, 12):
        for bases in (requested, quiet):
            note(bases, (0, 1), seed=step)
            bases.commit()
        requested.next_info(CHANGE)
        assert in_use(requested) == in_use(quiet)


def test_frames_do_not_wait_for_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    bases = learned_of((0, 1))
    first = in_use(bases)
    note(bases, (0, 1), seed=1)
    bases.commit()
    is_learning, may_end = learn_slowly(monkeypatch)
    thread = threading.Thread(target=bases.learn)
    thread.start()
    is_learning.wait()
    note(bases, (0, 1), seed=2)
    assert in_use(bases) == first
    may_end.set()
    thread.join()
    bases.commit()
    assert in_use(bases) != first


def test_what_is_known_is_what_somebody_waited_for() -> None:
    bases = learned_of((0, 1))
    assert bases.cached(CHANGE) is None
    assert bases.get(CHANGE) is bases.cached(CHANGE)
    other = learned_of((0, 1))
    other.learn()
    assert other.cached(CHANGE) is not None


def test_first_activations_vary_around_a_mean_and_changes_around_nothing() -> None:
    bases = SideInfoStore()
    for key in (FIRST, CHANGE):
        for sample in range(4):
            x = 5 + rows_of(sample)
            base = None if key is FIRST else torch.zeros_like(x)
            bases.record_frame(key, SampleId(sample), CODECS[key], x, base)
    bases.commit()
    first, change = bases.get(FIRST), bases.get(CHANGE)
    assert isinstance(first, Basis)
    assert first.mean is not None
    assert isinstance(change, Basis)
    assert change.mean is None


def test_a_step_of_silence_keeps_the_basis_and_the_next_is_learned_of() -> None:
    bases, zeros = SideInfoStore(), torch.zeros(TOKENS, CHANNELS)
    bases.record_frame(CHANGE, SampleId(0), parse("aqk1"), zeros, zeros)
    bases.commit()
    assert bases.get(CHANGE) is None
    for step in range(1, 4):  # also in one that would not make another
        note(bases, (0, 1), seed=step)
        bases.commit()
        assert bases.get(CHANGE) is not None
    before = name(bases)
    for _ in range(40):
        bases.record_frame(CHANGE, SampleId(0), parse("aqk1"), zeros, zeros)
        bases.commit()
    assert name(bases) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_values_that_are_not_finite_make_none(value: float) -> None:
    bases = SideInfoStore()
    x = torch.full((TOKENS, CHANNELS), value)
    bases.record_frame(CHANGE, SampleId(0), parse("aqk1"), x, torch.zeros_like(x))
    bases.commit()
    assert bases.get(CHANGE) is None


def test_long_samples_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_side_info, "_MOST_ROWS", 4)
    counts: list[int] = []

    def watched(rows: list[Tensor], *args: object, **kwargs: object) -> Basis | None:
        counts.extend(len(one) for one in rows)
        return learn_basis(rows, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(directional, "learn_basis", watched)
    bases = SideInfoStore()
    for tokens in (1, 3, 4, 5, 1000):
        x = torch.randn(tokens, CHANNELS)
        bases.record_frame(FIRST, SampleId(tokens), CODECS[FIRST], x, None)
    bases.commit()
    bases.get(FIRST)
    assert counts == [1, 3, 4, 3, 4]


# ---- steps that are redone


def test_the_order_of_frames_does_not_matter_nor_that_one_comes_twice() -> None:
    expected = name(learned_of((0, 1, 2)))
    assert name(learned_of((2, 0, 1))) == expected
    assert name(learned_of((1, 2, 0, 1, 2))) == expected
    bases = SideInfoStore()
    note(bases, (0, 1), seed=7)  # as another attempt saw them
    note(bases, (1, 0, 2))
    bases.commit()
    assert name(bases) == expected


def test_a_step_that_is_rolled_back_was_never_there() -> None:
    bases = SideInfoStore()
    note(bases, (0, 1, 5), seed=3)
    bases.rollback()
    note(bases, (0, 1, 2))
    bases.commit()
    assert name(bases) == name(learned_of((0, 1, 2)))


def test_but_for_the_samples_that_stay_done() -> None:
    bases = SideInfoStore()
    note(bases, (0, 1))
    note(bases, (5,), seed=3)
    bases.rollback(but={SampleId(0), SampleId(1)})
    note(bases, (2,))
    bases.commit()
    assert name(bases) == name(learned_of((0, 1, 2)))


def test_redone_steps_count_once() -> None:
    quiet, redone = SideInfoStore(), SideInfoStore()
    for step in range(9):
        note(redone, (0, 1), seed=50 + step)
        redone.rollback()
        for bases in (quiet, redone):
            note(bases, (0, 1), seed=step)
            bases.commit()
        assert name(quiet) == name(redone)


def test_a_rollback_after_the_commit_changes_nothing() -> None:
    bases = learned_of((0, 1))
    bases.rollback()
    assert name(bases) == name(learned_of((0, 1)))


# ---- written down and taken up


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_what_was_exported_goes_on_as_if_nothing_had_been(num_steps: int) -> None:
    bases, restored = SideInfoStore(), SideInfoStore()
    for step in range(num_steps):
        for key in (FIRST, CHANGE, GRADIENT):
            note(bases, (0, 1, 2), seed=step, key=key)
        bases.commit()
    for key in (CHANGE, GRADIENT):
        note(restored, (0,), seed=99, key=key)
    restored.restore(bases.export(), CHANNELS)
    for step in range(num_steps, num_steps + 12):
        for one in (bases, restored):
            for key in (CHANGE, GRADIENT):
                note(one, (0, 1, 2), seed=step, key=key)
            one.commit()
        gradients = [latest(one, GRADIENT) for one in (bases, restored)]
        assert len({None if basis is None else basis.name for basis in gradients}) == 1
        assert in_use(bases) == in_use(restored)
        assert name(bases) == name(restored)
        assert name(bases, FIRST) == name(restored, FIRST)


def test_an_export_holds_nothing_of_the_open_step() -> None:
    bases = learned_of((0, 1))
    before = bases.export()
    note(bases, (0, 1), seed=4)
    after = bases.export()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_nothing_takes_the_place_of_all() -> None:
    bases = learned_of((0, 1))
    bases.restore({}, CHANNELS)
    assert bases.get(CHANGE) is None
    assert bases.export() == {}


def test_whose_part_of_an_export_a_name_is() -> None:
    bases = learned_of((0, 1))
    assert {boundary_of(key) for key in bases.export()} == {2}


# fmt: off
WRONG_NAMES = [
    "", "/", "2", "2/", "/1", "2/0", "2/4", "-1/1", "+2/1", " 2/1", "2 /1", "02/1", "2/01", "1_0/1",
    "2/1/1", "٢/1", "2/1 ", "a/1", "9" * 5000 + "/1", "2/" + "1" * 5000, "2/1/step",
    "2/3/row", "2/3/rows/steps", "2/1/coming/rows", "2/1/coming/",
]
# fmt: on


@pytest.mark.parametrize("text", WRONG_NAMES)
def test_other_names_are_refused(text: str) -> None:
    exported = learned_of((0, 1)).export()[str(CHANGE)]
    with pytest.raises(BadFrame) as caught:
        SideInfoStore().restore({text: exported}, CHANNELS)
    assert len(caught.value.message) < 200
    with pytest.raises(BadFrame):
        boundary_of(text)


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(40, dtype=torch.uint8),
        torch.zeros(40),
        torch.zeros(4, 10, dtype=torch.uint8),
        torch.tensor(3, dtype=torch.uint8),
    ],
)
def test_what_is_no_basis_is_refused_and_all_stays(data: Tensor) -> None:
    bases = learned_of((0, 1))
    with pytest.raises(BadFrame):
        bases.restore({str(CHANGE): data}, CHANNELS)
    assert name(bases) == name(learned_of((0, 1)))


def test_a_basis_of_other_channels_is_refused() -> None:
    with pytest.raises(BadFrame):
        SideInfoStore().restore(learned_of((0, 1)).export(), CHANNELS + 1)


@pytest.mark.parametrize(
    "count", [torch.tensor(-1), torch.tensor(1.0), torch.tensor([1, 2]), torch.zeros(0).long()]
)
@pytest.mark.parametrize("what", ["steps", "tokens"])
def test_a_number_that_is_none_is_refused(count: Tensor, what: str) -> None:
    with pytest.raises(BadFrame):
        SideInfoStore().restore({f"{CHANGE}/{what}": count}, CHANNELS)


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(4, CHANNELS),
        torch.zeros(4, CHANNELS + 1, dtype=torch.bfloat16),
        torch.zeros(CHANNELS, dtype=torch.bfloat16),
        torch.zeros(0, CHANNELS, dtype=torch.bfloat16),
        torch.zeros(8193, CHANNELS, dtype=torch.bfloat16),
    ],
)
def test_rows_that_nobody_gathers_are_refused(rows: Tensor) -> None:
    with pytest.raises(BadFrame):
        SideInfoStore().restore({f"{GRADIENT}/rows": rows}, CHANNELS)


# ---- several threads


def test_frames_of_many_threads_make_what_those_of_one_make() -> None:
    bases, num_threads = SideInfoStore(), 4
    for step in range(8):
        begin = threading.Barrier(num_threads)

        def work(own: int, step: int = step, begin: threading.Barrier = begin) -> None:
            begin.wait()
            note(bases, range(own, 12, num_threads), seed=step)
            bases.get(CHANGE)
            bases.cached(CHANGE)
            bases.learn()

        threads = [threading.Thread(target=work, args=(k,)) for k in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bases.commit()
    quiet = SideInfoStore()
    for step in range(8):
        note(quiet, range(12), seed=step)
        quiet.commit()
    assert name(bases) == name(quiet)


def test_who_asks_for_what_is_known_does_not_wait_for_what_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bases = learned_of((0, 1), key=FIRST)
    expected = bases.get(FIRST)
    note(bases, (0, 1))
    bases.commit()
    is_learning, may_end = learn_slowly(monkeypatch)
    thread = threading.Thread(target=bases.get, args=(CHANGE,))
    thread.start()
    is_learning.wait()
    assert bases.cached(FIRST) is expected
    note_is_free = threading.Thread(target=bases.rollback)
    note_is_free.start()
    note_is_free.join()
    may_end.set()
    thread.join()
    assert bases.cached(CHANGE) is not None


def test_an_export_waits_for_what_another_thread_is_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bases = learned_of((0, 1))
    expected = learned_of((0, 1)).export()
    is_learning, may_end = learn_slowly(monkeypatch)
    learning = threading.Thread(target=bases.learn)
    learning.start()
    is_learning.wait()
    exported: list[dict[str, Tensor]] = []
    exporting = threading.Thread(target=lambda: exported.append(bases.export()))
    exporting.start()
    may_end.set()
    for thread in (learning, exporting):
        thread.join()
    assert exported[0].keys() == expected.keys()
    assert all(torch.equal(exported[0][key], expected[key]) for key in expected)
