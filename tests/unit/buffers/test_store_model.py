"""The store with its disk against a model: it may lose records and says so, it is never wrong."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm_ft.buffers import BufferLimits, BufferStore, End
from swarm_ft.protocol.training_plan import NEVER, VisitOrder
from tests.specs import train_spec

from .conftest import RUN, SLOT_BYTES, SPEC, key, record

NUM_SAMPLES, BATCH, NUM_STEPS = 7, 2, 16
OTHER_SPEC = b"o" * 16

keys = st.builds(
    key,
    sample=st.integers(0, NUM_SAMPLES - 1),
    boundary=st.sampled_from([1, 2]),
    end=st.sampled_from([End.SENT, End.RESIDUAL]),
)
sizes = st.sampled_from([50, 5000])


class DiskMachine(RuleBasedStateMachine):
    """What the store should hold, what it said it lost, and all that was ever committed."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="buffers-model-"))
        self.order = VisitOrder(
            train_spec(
                num_samples=NUM_SAMPLES,
                batch_size=BATCH,
                micro_batch_size=1,
                num_steps=NUM_STEPS,
                shuffle=True,
            )
        )
        self.held, self.staged, self.ever = {}, {}, {}
        self.num_records, self.step = 0, 0
        self.writes, self.reads = [], []
        self.is_damaged = False

    @initialize(
        memory_bytes=st.sampled_from([0, 100, 5200, None]),
        disk_slots=st.sampled_from([0, 3, 9, None]),
    )
    def begin(self, memory_bytes, disk_slots):
        disk_bytes = None if disk_slots is None else (2 + disk_slots) * SLOT_BYTES
        self.limits = BufferLimits(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        self.store = self.open(SPEC)

    def open(self, identity):
        return BufferStore(
            self.limits,
            directory=self.folder,
            run_id=RUN,
            identity=identity,
            visits=self.order,
            threads=False,
        )

    def teardown(self):
        if hasattr(self, "store"):
            self.finish_all()
            self.store.close()
        shutil.rmtree(self.folder)

    # ---- steps

    def new_record(self, name, size):
        self.num_records += 1
        made = record(f"{self.num_records}: {name.boundary} {name.end} {name.sample}", size)
        self.ever.setdefault(name, []).append(made)
        return made

    @rule(name=keys, size=sizes)
    def stage(self, name, size):
        self.staged[name] = self.new_record(name, size)
        self.store.stage(name, self.staged[name])

    @rule()
    def commit(self):
        self.store.commit(self.step)
        for name, staged in self.staged.items():
            self.held[name] = staged
            if self.order.next_visit(name.sample, self.step) == NEVER:
                del self.held[name]
        self.staged = {}
        self.step += 1

    @rule(but=st.sets(st.integers(0, NUM_SAMPLES - 1)))
    def rollback(self, but):
        self.store.rollback(but)
        self.staged = {name: r for name, r in self.staged.items() if name.sample in but}

    @rule(step=st.integers(0, NUM_STEPS))
    def go_on_elsewhere(self, step):
        self.step = step
        self.store.resume_at(step)

    @rule(name=keys, size=sizes, replace=st.booleans())
    def put(self, name, size, replace):
        self.note_losses()
        made = self.new_record(name, size)
        expected = replace or (name not in self.held and name not in self.staged)
        assert self.store.put(name, made, replace=replace) == expected
        if expected:
            self.held[name] = made

    @rule()
    def forget(self):
        self.finish_all()
        self.store.forget()
        self.held, self.staged = {}, {}

    # ---- reads and writes, whole or interleaved with all else

    @rule()
    def write_one(self):
        self.store.write_next()

    @rule(names=st.lists(keys, max_size=4))
    def prefetch(self, names):
        self.store.prefetch(names)

    @rule()
    def read_one(self):
        self.store.read_next()

    @rule()
    def begin_write(self):
        self.writes.append(self.store._tiers.start_write())

    @rule(late=st.booleans())
    @precondition(lambda self: self.writes)
    def finish_write(self, late):
        job = self.writes.pop(-1 if late else 0)
        if job is not None:
            self.store._tiers.finish_write(job, job.run())

    @rule()
    def begin_read(self):
        job = self.store._tiers.start_read()
        self.reads.append(job and (job, job.run()))

    @rule(late=st.booleans())
    @precondition(lambda self: self.reads)
    def finish_read(self, late):
        found = self.reads.pop(-1 if late else 0)
        if found is not None:
            self.store._tiers.finish_read(*found)

    def finish_all(self):
        while self.writes:
            self.finish_write(late=False)
        while self.reads:
            self.finish_read(late=False)

    # ---- what goes wrong

    def slabs(self):
        return sorted(self.folder.glob("run-*/*.slab"))

    @rule(where=st.integers(0, 1 << 20), bit=st.integers(0, 7))
    def flip_a_bit(self, where, bit):
        for path in self.slabs()[:1]:
            data = bytearray(path.read_bytes())
            data[where % len(data)] ^= 1 << bit
            with path.open("r+b") as file:
                file.write(data)
            self.is_damaged = True

    @rule(where=st.integers(0, 1 << 20))
    def truncate(self, where):
        for path in self.slabs()[:1]:
            with path.open("r+b") as file:
                file.truncate(where % (path.stat().st_size + 1))
            self.is_damaged = True

    @rule()
    def delete_a_file(self):
        for path in self.slabs()[:1]:
            path.unlink()
            self.is_damaged = True

    @rule()
    def another_spec_leaves_a_file(self):
        self.stop(flush=True)
        other = self.open(OTHER_SPEC)
        other.put(key(), record("foreign"))
        other.close()
        if self.limits.disk_bytes is not None:
            self.is_damaged = True  # that file may have taken our room
        self.start()

    @rule()
    def put_another_specs_file_in_place(self):
        self.stop(flush=True)
        for path in self.slabs():
            for other in self.slabs():
                if other.parent != path.parent and other.name == path.name:
                    shutil.copy(other, path)
                    self.is_damaged = True
        self.start()

    @rule(flush=st.booleans())
    def restart(self, flush):
        self.stop(flush=flush)
        self.start()

    def stop(self, *, flush):
        if flush:
            self.finish_all()
            self.store.close()
        self.writes, self.reads = [], []
        disk = self.store._disk
        self.must_be_there = {name for name in self.held if disk.find(name)}
        if not flush:
            self.note_losses()
            self.must_be_there &= self.held.keys()
            disk.close()
        self.was_flushed = flush

    def start(self):
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
        found = dict(self.store.records())
        for name, value in found.items():
            assert value in self.ever[name]
        self.held, self.staged, self.is_damaged = found, {}, False
        self.store.resume_at(self.step)
        self.store.take_lost()

    # ---- what must hold

    def note_losses(self):
        for name in self.store.take_lost():
            del self.held[name]

    @rule(name=keys)
    def get(self, name):
        found = self.store.get(name)
        self.note_losses()
        assert found == self.held.get(name)

    @rule()
    def get_all(self):
        found = dict(self.store.records())
        self.note_losses()
        assert found == self.held

    @invariant()
    def it_holds_what_it_did_not_lose(self):
        if hasattr(self, "store"):
            self.note_losses()
            assert set(self.store.keys()) == self.held.keys()
            assert len(self.store) == len(self.held)

    @invariant()
    def the_limits_hold(self):
        if hasattr(self, "store"):
            files = list(self.folder.rglob("*.slab"))
            if self.limits.disk_bytes is not None:
                assert sum(path.stat().st_size for path in files) <= self.limits.disk_bytes


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=40
)
