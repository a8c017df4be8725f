"""The store with its disk against a model: it reports lost records, and is never wrong."""

import inspect
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.buffers.disk import DeleteJob
from swarm_ft.buffers.slab import Broken
from swarm_ft.buffers.tiers import ReadJob, WriteJob
from swarm_ft.ids import SampleId, StepNumber
from swarm_ft.protocol.spec.training_plan import NEVER, VisitOrder, step_samples
from tests.draws import draws
from tests.specs import train_spec

from .conftest import RUN, SLOT_BYTES, SPEC, key, record

NUM_SAMPLES, BATCH, NUM_STEPS = 6, 2, 12
OTHER_SPEC = b"o" * 16

keys = st.builds(
    key,
    sample=st.integers(0, NUM_SAMPLES - 1),
    end=st.sampled_from([End.SENT, End.SENT, End.SENT, End.RESIDUAL]),
)
sizes = st.sampled_from([50, 50, 50, 5000])


class DiskMachine(RuleBasedStateMachine):
    """A model of the store: its records, its reported losses, and all that was ever committed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="buffers-model-"))
        self.train = train_spec(
            num_samples=NUM_SAMPLES,
            batch_size=BATCH,
            micro_batch_size=1,
            num_steps=NUM_STEPS,
            shuffle=True,
        )
        self.order = VisitOrder(self.train)
        self.held: dict[BufferKey, BufferRecord] = {}
        self.staged: dict[BufferKey, BufferRecord] = {}
        self.ever: dict[BufferKey, list[BufferRecord]] = {}
        self.lent: dict[BufferKey, BufferRecord] = {}
        self.num_records, self.step = 0, StepNumber(0)
        self.writes: list[WriteJob | DeleteJob | None] = []
        self.reads: list[tuple[ReadJob, BufferRecord | Broken] | None] = []
        self.is_damaged = False

    @initialize(
        memory_bytes=st.sampled_from([0, 0, 100, 5200, None]),
        disk_slots=st.sampled_from([0, 3, 6, None, None]),
    )
    def begin(self, memory_bytes: int | None, disk_slots: int | None) -> None:
        disk_bytes = None if disk_slots is None else (2 + disk_slots) * SLOT_BYTES
        self.limits = BufferLimits(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        self.store = self.open(SPEC)

    def open(self, identity: bytes) -> BufferStore:
        return BufferStore(
            self.limits,
            directory=self.folder,
            run_id=RUN,
            identity=identity,
            visits=self.order,
            threads=False,
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.finish_all()
            self.store.close()
        shutil.rmtree(self.folder)

    # ---- steps

    def new_record(self, name: BufferKey, size: int) -> BufferRecord:
        self.num_records += 1
        made = record(f"{self.num_records}: {name.boundary} {name.end} {name.sample}", size)
        self.ever.setdefault(name, []).append(made)
        return made

    @rule(name=keys, size=sizes)
    def stage(self, name: BufferKey, size: int) -> None:
        self.staged[name] = self.new_record(name, size)
        self.store.stage(name, self.staged[name])

    @rule(end=st.sampled_from([End.SENT, End.SENT, End.RESIDUAL]), is_written=st.booleans())
    def train_a_step(self, end: End, is_written: bool) -> None:
        if self.step >= NUM_STEPS:
            self.go_on_elsewhere(0)
        for sample in step_samples(self.train, self.step):
            self.stage(key(sample, end=end), 50)
        self.commit()
        while is_written and self.store.write_next():
            pass

    @rule()
    def commit(self) -> None:
        self.store.commit(self.step)
        for name, staged in self.staged.items():
            self.held[name] = staged
            if self.order.next_visit(name.sample, self.step) == NEVER:
                del self.held[name]
        self.staged, self.lent = {}, {}
        self.step = StepNumber(self.step + 1)

    @rule(but=st.sets(st.integers(0, NUM_SAMPLES - 1)))
    def rollback(self, but: set[SampleId]) -> None:
        self.store.rollback(but)
        self.staged = {name: r for name, r in self.staged.items() if name.sample in but}

    @rule(step=st.integers(0, NUM_STEPS))
    def go_on_elsewhere(self, step: int) -> None:
        self.step = StepNumber(step)
        self.store.resume_at(self.step)

    @rule(name=keys, size=sizes)
    def put(self, name: BufferKey, size: int) -> None:
        self.note_losses()
        self.held[name] = self.new_record(name, size)
        self.store.put(name, self.held[name])
        self.lent.pop(name, None)

    @rule()
    def forget(self) -> None:
        self.finish_all()
        self.store.forget()
        self.held, self.staged, self.lent = {}, {}, {}

    # ---- reads and writes, whole or interleaved with all else

    @rule()
    def write_one(self) -> None:
        self.store.write_next()

    @rule()
    def prefetch(self) -> None:
        samples = step_samples(self.train, StepNumber(min(self.step, NUM_STEPS - 1)))
        self.store.prefetch([key(sample) for sample in samples])

    @rule()
    def read_one(self) -> None:
        self.store.read_next()

    @rule()
    @precondition(lambda self: self.store.tiers.has_writes)
    def begin_write(self) -> None:
        self.writes.append(self.store.tiers.start_write())

    @rule(late=st.booleans())
    @precondition(lambda self: self.writes)
    def finish_write(self, late: bool) -> None:
        job = self.writes.pop(-1 if late else 0)
        if job is not None:
            self.store.tiers.finish_write(job, job.run())

    @rule()
    @precondition(lambda self: self.store.tiers.has_reads)
    def begin_read(self) -> None:
        job = self.store.tiers.start_read()
        self.reads.append((job, job.run()) if job else None)

    @rule(late=st.booleans())
    @precondition(lambda self: self.reads)
    def finish_read(self, late: bool) -> None:
        found = self.reads.pop(-1 if late else 0)
        if found is not None:
            self.store.tiers.finish_read(*found)

    def finish_all(self) -> None:
        while self.writes:
            self.finish_write(late=False)
        while self.reads:
            self.finish_read(late=False)

    # ---- what goes wrong

    def slabs(self) -> list[Path]:
        return sorted(self.folder.glob("run-*/*.slab"))

    @rule(slot=st.integers(0, 8), where=st.integers(0, 150), bit=st.integers(0, 7))
    def flip_a_bit(self, slot: int, where: int, bit: int) -> None:
        for path in self.slabs()[:1]:
            data = bytearray(path.read_bytes())
            data[(slot * SLOT_BYTES + where) % len(data)] ^= 1 << bit
            with path.open("r+b") as file:
                file.write(data)
            self.is_damaged = True

    @rule(where=st.integers(0, 1 << 20))
    def truncate(self, where: int) -> None:
        for path in self.slabs()[:1]:
            with path.open("r+b") as file:
                file.truncate(where % (path.stat().st_size + 1))
            self.is_damaged = True

    @rule()
    def delete_a_file(self) -> None:
        for path in self.slabs()[:1]:
            path.unlink()
            self.is_damaged = True

    @rule()
    def another_spec_leaves_a_file(self) -> None:
        self.stop(flush=True)
        other = self.open(OTHER_SPEC)
        other.put(key(), record("foreign"))
        other.close()
        if self.limits.disk_bytes is not None:
            self.is_damaged = True  # that file may have taken our room
        self.start()

    @rule()
    def put_another_specs_file_in_place(self) -> None:
        self.stop(flush=True)
        for path in self.slabs():
            for other in self.slabs():
                if other.parent != path.parent and other.name == path.name:
                    shutil.copy(other, path)
                    self.is_damaged = True
        self.start()

    @rule(flush=st.booleans())
    def restart(self, flush: bool) -> None:
        self.stop(flush=flush)
        self.start()

    def stop(self, *, flush: bool) -> None:
        if flush:
            self.finish_all()
            self.store.close()
        self.writes, self.reads = [], []
        disk = self.store.disk
        assert disk is not None
        self.must_be_there = {name for name in self.held if disk.find(name)}
        if not flush:
            self.note_losses()
            self.must_be_there &= self.held.keys()
            disk.close()
        self.was_flushed = flush

    def start(self) -> None:
        self.store = self.open(SPEC)
        if not self.is_damaged:
            for name in self.must_be_there:
                found = self.store.get(name)
                if name.end is End.RESIDUAL:
                    assert found is None
                elif self.was_flushed:
                    assert found == self.held[name]
                else:
                    assert found is not None
        self.held = dict(self.store.records())
        for name, value in self.held.items():
            assert value in self.ever[name]
        self.staged, self.lent, self.is_damaged = {}, {}, False
        self.store.resume_at(self.step)
        self.store.take_lost()

    # ---- what must hold

    def note_losses(self) -> None:
        for name in self.store.take_lost():
            del self.held[name]

    @rule(name=keys)
    def get(self, name: BufferKey) -> None:
        self.note_losses()
        held = self.held.get(name)
        found = self.store.get(name)
        self.note_losses()  # what comes back into a full memory may be the next to go
        if name in self.held:
            assert found == self.held[name]
        else:  # what the open step builds on stays until its commit, lost or not
            assert found in (None, held, self.lent.get(name))
        if found is not None:
            self.lent[name] = found

    @rule()
    def get_all(self) -> None:
        found = dict(self.store.records())
        self.note_losses()
        assert found == self.held

    @invariant()
    def it_holds_what_it_did_not_lose(self) -> None:
        if hasattr(self, "store"):
            self.note_losses()
            assert set(self.store.keys()) == self.held.keys()
            assert len(self.store) == len(self.held)

    @invariant()
    def the_limits_hold(self) -> None:
        if hasattr(self, "store"):
            files = list(self.folder.rglob("*.slab"))
            if self.limits.disk_bytes is not None:
                assert sum(path.stat().st_size for path in files) <= self.limits.disk_bytes


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=draws(60), stateful_step_count=60
)


WEIGHTS = {
    "train_a_step": 60,
    "get": 60,
    "begin_write": 30,
    "finish_write": 25,
    "write_one": 15,
    "prefetch": 20,
    "begin_read": 25,
    "finish_read": 20,
    "read_one": 10,
    "flip_a_bit": 12,
    "put": 10,
    "stage": 10,
    "commit": 5,
    "rollback": 3,
    "restart": 4,
    "go_on_elsewhere": 2,
    "truncate": 1,
    "delete_a_file": 1,
    "another_spec_leaves_a_file": 1,
    "put_another_specs_file_in_place": 1,
    "forget": 1,
}


def arguments_of(rng: random.Random, rule: str) -> dict[str, Any]:
    choices = {
        "name": key(rng.randrange(NUM_SAMPLES), end=rng.choice([End.SENT] * 3 + [End.RESIDUAL])),
        "size": rng.choice([50, 50, 50, 5000]),
        "end": rng.choice([End.SENT, End.SENT, End.RESIDUAL]),
        "is_written": rng.random() < 0.5,
        "late": rng.random() < 0.5,
        "flush": rng.random() < 0.5,
        "but": set(rng.sample(range(NUM_SAMPLES), 3)),
        "step": rng.randrange(NUM_STEPS),
        "slot": rng.randrange(9),
        "where": rng.randrange(1 << 20) if rule == "truncate" else rng.randrange(150),
        "bit": rng.randrange(8),
    }
    wanted = inspect.signature(getattr(DiskMachine, rule)).parameters
    return {name: choices[name] for name in wanted if name in choices}


LONG_AGAIN = (pytest.mark.slow, pytest.mark.variant)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=LONG_AGAIN) for seed in range(12, 40))]
)
@pytest.mark.sampled(4)
def test_a_long_walk_never_finds_a_wrong_record(seed: int) -> None:
    rng = random.Random(seed)
    machine = DiskMachine()
    try:
        machine.begin(rng.choice([0, 0, 100, 5200, None]), rng.choice([0, 3, 6, None, None]))
        for rule in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=300):
            if rule.startswith("finish") and not getattr(machine, rule[7:] + "s"):
                continue
            getattr(machine, rule)(**arguments_of(rng, rule))
            machine.it_holds_what_it_did_not_lose()
            machine.the_limits_hold()
    finally:
        machine.teardown()
