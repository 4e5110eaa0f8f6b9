"""More adapters than slots: what is copied when, and in which order against compute."""

import random
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from threading import RLock
from types import SimpleNamespace

import pytest
import torch

from moelora import EngineOptions, PrefillEngine, Request
from moelora.adapters import streams as streams_module
from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter
from moelora.adapters.host import HostAdapters, outline
from moelora.adapters.residency import Residency
from moelora.adapters.streams import CudaStreams, InOrder, Streams, pieces
from moelora.batching.planner import BatchLimits, plan
from moelora.batching.sequences import Sequence
from moelora.batching.slots import look_ahead
from small_bank import CATALOGUE, make_adapter
from tiny_models import VOCAB, peft_adapter, save_model

CPU = torch.device("cpu")


class Op:
    def __init__(self, work, after):
        self.work, self.after, self.done = work, [op for op in after if op is not None], False


class TwoLines(Streams):
    """Work waits in two lines until `run`, which takes from either as chance has it and marks allow."""

    def __init__(self):
        self.lines = {"copy": deque(), "compute": deque()}
        self._last_compute = None
        self._compute_after = []

    def copy(self, work, after):
        op = Op(work, after)
        self.lines["copy"].append(op)
        return op

    def compute(self, work):
        op = self._last_compute = Op(work, self._compute_after)
        self._compute_after = []
        self.lines["compute"].append(op)

    def compute_mark(self):
        return self._last_compute

    def compute_waits(self, mark, reads=()):
        self._compute_after.append(mark)

    def run(self, rng):
        order = []
        while any(self.lines.values()):
            able = [n for n, line in self.lines.items() if line and all(op.done for op in line[0].after)]
            assert able, "both lines wait for each other"
            name = rng.choice(able)
            op = self.lines[name].popleft()
            op.work()
            op.done = True
            order.append(name)
        return order


class CopiesDoNotWait(TwoLines):
    def copy(self, work, after):
        return super().copy(work, [])


class ComputeDoesNotWait(TwoLines):
    def compute_waits(self, mark, reads=()):
        pass


def expected(adapter: Adapter, name: str, bank: AdapterBank, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = bank.slots[name]
    a, b = (slots.a_LRI, slots.b_LOR) if name == "q" else (slots.a_LERI, slots.b_LEOR)
    want_a, want_b = torch.zeros_like(a[slot]), torch.zeros_like(b[slot])
    factors = adapter.factors.get(name)
    if factors is not None:
        want_a[..., : factors.rank, :] = factors.a
        want_b[..., : factors.rank] = factors.b
    return (a[slot], b[slot]), (want_a, want_b)


def play(streams: Streams, seed: int, *, budget: int | None = None) -> tuple[list[str], AdapterBank, list[str]]:
    """Runs a random plan; returns what compute found wrong, the bank, and the order of copies and compute."""
    rng = random.Random(seed)
    slots, count = rng.randint(1, 4), rng.randint(1, 9)
    made = {f"a{i}": make_adapter(f"a{i}", rng.randrange(1000)) for i in range(count)}
    paths = {name: Path(name) for name in made}
    host = HostAdapters(
        paths, lambda name, path, allocate: made[name], lambda name, path: outline(made[name]), budget=budget
    )
    bank = AdapterBank(
        CATALOGUE, BankLayout.of(host.values()), slots=slots, device=CPU, dtype=torch.float32, streams=streams
    )
    residency = Residency(host, bank)
    sequences = [
        Sequence(
            request=i, adapter=rng.choice([*made, "__base__"]), token_ids=(0,) * rng.randint(1, 9), runs=(), top_k=0
        )
        for i in range(60)
    ]
    limits = BatchLimits(max_tokens=20, max_sequences=8, max_adapters=slots)
    wrong = []

    def read(name, slot):
        for target in bank.slots:
            have, want = expected(made[name], target, bank, slot)
            if not all(map(torch.equal, have, want)):
                wrong.append(name)

    placed = ((batch, residency.place(batch)) for batch in plan(sequences, limits))
    for (batch, placement), upcoming in look_ahead(placed, rng.randint(0, 9)):
        residency.bring(placement)
        needed = {s.adapter for s in batch.sequences} - {"__base__"}

        def forward(needed=needed, placement=placement):
            for name in needed:
                read(name, placement[name])

        streams.compute(forward) if isinstance(streams, TwoLines) else forward()
        residency.prefetch(placement, [later for _, later in upcoming])
        residency.release(placement)
    order = streams.run(rng) if isinstance(streams, TwoLines) else []
    assert bank.loads == len({s.adapter for s in sequences} - {"__base__"})
    return wrong, bank, order


@pytest.mark.parametrize("seed", range(60))
def test_every_batch_reads_its_own_adapters_in_whatever_order_the_streams_run(seed):
    assert play(TwoLines(), seed)[0] == []
    assert play(InOrder(), seed)[0] == []


@pytest.mark.parametrize("careless", [CopiesDoNotWait, ComputeDoesNotWait])
def test_without_the_marks_batches_read_what_is_not_theirs(careless):
    assert any(play(careless(), seed)[0] for seed in range(20))


def test_an_adapter_is_copied_while_the_one_before_it_is_used():
    """Six adapters of five batches each on two slots, copies as eager as the marks allow."""
    made = {f"a{i}": make_adapter(f"a{i}", 4 * i) for i in range(6)}
    host = HostAdapters(made, lambda name, path, allocate: made[name], lambda name, path: outline(made[name]))
    streams = TwoLines()
    bank = AdapterBank(
        CATALOGUE, BankLayout.of(host.values()), slots=2, device=CPU, dtype=torch.float32, streams=streams
    )
    residency = Residency(host, bank)
    sequences = [Sequence(request=i, adapter=f"a{i % 6}", token_ids=(0,) * 9, runs=(), top_k=0) for i in range(60)]
    limits = BatchLimits(max_tokens=20, max_sequences=8, max_adapters=2)
    placed = [(batch, residency.place(batch)) for batch in plan(sequences, limits)]
    queued_at = {}
    for number, ((_, placement), upcoming) in enumerate(look_ahead(placed, 9)):
        residency.bring(placement)
        streams.compute(lambda: None)
        residency.prefetch(placement, [later for _, later in upcoming])
        residency.release(placement)
        for _ in range(len(queued_at), bank.loads):
            queued_at[len(queued_at)] = number
    # The first is brought before its batch; each other when its slot's tenant has left, a turn ahead of its own.
    assert queued_at == {0: 0, 1: 0, 2: 5, 3: 10, 4: 15, 5: 20}

    class CopiesFirst(random.Random):
        def choice(self, seq):
            return "copy" if "copy" in seq else seq[0]

    order = streams.run(CopiesFirst())
    done = [order[:i].count("compute") for i, name in enumerate(order) if name == "copy"]
    assert done == [0, 0, 5, 10, 15, 20]


def test_a_load_that_fails_leaves_no_adapter_behind_a_name():
    class Broken(InOrder):
        broken = False

        def copy(self, work, after):
            if self.broken:
                raise torch.OutOfMemoryError("no room")
            return super().copy(work, after)

    adapter = make_adapter("x", 3)
    streams = Broken()
    bank = AdapterBank(CATALOGUE, BankLayout.of([adapter]), slots=1, device=CPU, dtype=torch.float32, streams=streams)
    bank.load(0, adapter)
    streams.broken = True
    with pytest.raises(torch.OutOfMemoryError):
        bank.load(0, adapter)
    assert bank.residents == (None,)
    streams.broken = False
    bank.load(0, adapter)
    assert bank.residents == ("x",)
    bank.clear(0)
    assert bank.residents == (None,)
    assert not any(t.any() for s in bank.slots.values() for t in (getattr(s, f) for f in s.__dataclass_fields__))


# From ordinary memory onto a device.


class LateDevice:
    """Copies what it is told to as late as it may: when somebody waits for it, or at the end."""

    def __init__(self):
        self.queue, self.done, self.lock = [], 0, RLock()

    def queue_copy(self, to, values):
        with self.lock:
            self.queue.append((to, values))

    def record_event(self):
        number = len(self.queue)
        return SimpleNamespace(synchronize=lambda: self.run(number))

    def run(self, number):
        with self.lock:
            for to, values in self.queue[self.done : number]:
                to.as_subclass(torch.Tensor).copy_(values)
            self.done = max(self.done, number)


class OnDevice(torch.Tensor):
    device_of_all: LateDevice

    def copy_(self, values, non_blocking=False):
        self.device_of_all.queue_copy(self, values)
        return self


@pytest.mark.parametrize("cores", [1, 3, 64])
def test_what_is_not_page_locked_goes_through_buffers_that_are_not_filled_too_early(monkeypatch, cores):
    device = OnDevice.device_of_all = LateDevice()
    monkeypatch.setattr(streams_module, "_CHUNK", 512)
    monkeypatch.setattr(streams_module, "cpu_count", lambda: cores)
    monkeypatch.setattr(streams_module, "page_locked", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    streams = CudaStreams.__new__(CudaStreams)
    streams._side = device
    shapes = [(40, 3, 5), (7, 200), (1, 900), (5, 2), (64, 16), (3, 500, 1), (1000,)]
    made = []
    for shape in shapes * 5:
        values = torch.randn(shape).to(random.choice((torch.bfloat16, torch.float32)))
        room = torch.zeros(*shape[:-1], shape[-1] + random.choice((0, 4)), dtype=values.dtype)
        made.append((room, values))
    wide = torch.zeros(6, 3, 300), torch.randn(1, 3, 300)
    transfers = [(room[..., : values.shape[-1]].as_subclass(OnDevice), values) for room, values in (*made, wide)]
    streams.put(transfers)
    assert len(device.queue) > len(transfers)
    device.run(len(device.queue))
    for room, values in (*made, wide):
        assert torch.equal(room[..., : values.shape[-1]], values.expand_as(room[..., : values.shape[-1]]))
        assert not room[..., values.shape[-1] :].any()


def test_pieces_are_small_and_cover_everything():
    values = torch.randn(10, 6)
    cut = list(pieces(torch.zeros(10, 6), values, 50))
    assert [len(some) for _, some in cut] == [2] * 5
    assert torch.equal(torch.cat([some for _, some in cut]), values)
    assert [len(some) for _, some in pieces(torch.zeros(10, 6), values, 5)] == [1] * 10
    assert len(list(pieces(torch.zeros(10, 10, 6), values, 50))) == 1


# The engine.


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    model = save_model(folder / "model", "qwen3_moe", seed=1)
    for i in range(6):
        peft_adapter(folder / f"a{i}", model, i, rank=1 + i, target_modules=["q_proj", "o_proj"])
    return folder / "model", {f"a{i}": folder / f"a{i}" for i in range(6)}


@pytest.mark.parametrize("host_bytes", [None, 0])
def test_adapters_take_turns_in_the_slots(world, host_bytes):
    model, adapters = world
    rng = torch.Generator().manual_seed(3)
    names = [*adapters, "__base__"]
    requests = [
        Request(
            token_ids=torch.randint(0, VOCAB, (int(torch.randint(2, 30, (), generator=rng)),), generator=rng).tolist(),
            adapter=names[int(torch.randint(0, 7, (), generator=rng))],
        )
        for _ in range(80)
    ]
    options = EngineOptions(device="cpu", slots=2, max_tokens=64, host_bytes=host_bytes)
    engine = PrefillEngine(model, adapters=adapters, options=options)
    got = engine.score(requests)
    report = engine.report()
    assert report["adapter_loads"] == 6
    assert report["adapters_kept_on_host"] == (6 if host_bytes is None else 0)
    for request, result in zip(requests, got, strict=True):
        alone = PrefillEngine.score(engine, [request])[0]
        assert result.logprob_sum == pytest.approx(alone.logprob_sum, abs=1e-4)
    everything = PrefillEngine(model, adapters=adapters, options=EngineOptions(device="cpu", slots=6, max_tokens=64))
    assert [r.logprob_sum for r in everything.score(requests)] == pytest.approx([r.logprob_sum for r in got], abs=1e-4)
