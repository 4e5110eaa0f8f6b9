"""More adapters than slots: what is copied when, in which order against compute, and from where in host memory."""

import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moelora import AdapterError, EngineOptions, PrefillEngine, Request
from moelora.adapters.arena import Arena, ordinary
from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter, Catalogue, Factors, Target, TargetKind
from moelora.adapters.host import READ_AHEAD, HostAdapters, outline, pinned
from moelora.adapters.residency import Residency
from moelora.adapters.streams import InOrder, Streams
from moelora.batching.planner import BatchLimits, plan
from moelora.batching.sequences import Sequence
from moelora.batching.slots import look_ahead
from moelora.environment import free_host_memory
from tiny_models import VOCAB, peft_adapter, save_model

LINEAR = Target(name="q", kind=TargetKind.LINEAR, in_features=3, out_features=4, shape=(4, 3))
EXPERTS = Target(name="e", kind=TargetKind.EXPERTS, in_features=3, out_features=5, shape=(2, 5, 3), num_experts=2)
CATALOGUE = Catalogue(model_type="x", targets={"q": LINEAR, "e": EXPERTS}, num_layers=1, tied_lm_head=False)
CPU = torch.device("cpu")


def make_adapter(name: str, seed: int) -> Adapter:
    """Some touch one target, some both, in ranks of their own."""
    rng = torch.Generator().manual_seed(seed)
    rank = 1 + seed % 3
    factors = {}
    if seed % 4 != 1:
        factors["q"] = Factors(a=torch.randn(rank, 3, generator=rng), b=torch.randn(4, rank, generator=rng))
    if seed % 4 != 2:
        factors["e"] = Factors(a=torch.randn(2, rank, 3, generator=rng), b=torch.randn(2, 5, rank, generator=rng))
    return Adapter(name=name, path=Path(name), factors=factors)


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
    host = HostAdapters({name: Path(name) for name in made}, lambda name, path, allocate: made[name], budget=budget)
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
    host = HostAdapters(made, lambda name, path, allocate: made[name])
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


# Host memory.


class Disk:
    """Adapters on a disk, and how often each was read."""

    def __init__(self, folder: Path, count: int = 5):
        self.paths = {}
        self.reads = []
        self.memories = []
        for i in range(count):
            self.paths[f"a{i}"] = folder / f"a{i}"
            self.paths[f"a{i}"].mkdir()
            (self.paths[f"a{i}"] / "adapter_config.json").write_text("{}")

    def load(self, name, path, allocate):
        self.reads.append(name)
        self.memories.append(allocate)
        made = make_adapter(name, 4 * int(name[1:]))
        return Adapter(name=name, path=self.paths[name], factors=made.factors)


def test_what_fits_is_kept_and_the_rest_is_read_again(tmp_path):
    disk, said = Disk(tmp_path), []
    one = disk.load("a0", disk.paths["a0"], ordinary).nbytes
    disk.reads.clear()
    host = HostAdapters(disk.paths, disk.load, budget=3 * one, say=said.append)
    assert sorted(disk.reads) == list(host) == [f"a{i}" for i in range(5)]
    assert host.kept < 5
    assert f"{host.kept} of 5 adapters stay in host memory" in said[-1]
    assert all(f.a.is_meta and f.b.is_meta for adapter in host.values() for f in adapter.factors.values())
    kept = [name for name in host if host.is_ready(name)]
    assert len(kept) == host.kept
    disk.reads.clear()
    for name in host:
        assert torch.equal(host.take(name).factors["q"].a, make_adapter(name, 4 * int(name[1:])).factors["q"].a)
    assert disk.reads == [name for name in host if name not in kept]


def test_a_bad_adapter_is_refused_by_the_first_in_order(tmp_path):
    disk = Disk(tmp_path)

    def load(name, path, allocate):
        if name in ("a1", "a3"):
            raise AdapterError(f"{name} is bad")
        return disk.load(name, path, allocate)

    with pytest.raises(AdapterError, match="a1 is bad"):
        HostAdapters(disk.paths, load)


def test_an_adapter_in_memory_is_kept_as_it_is(tmp_path):
    disk, own = Disk(tmp_path, 2), make_adapter("own", 3)
    host = HostAdapters({**disk.paths, "own": own}, disk.load, budget=0)
    assert list(host) == ["a0", "a1", "own"]
    assert host.kept == 1
    assert host.take("own") is own


def test_reading_ahead_is_bounded_and_lets_go_of_what_is_no_longer_wanted(tmp_path):
    disk = Disk(tmp_path)
    host = HostAdapters(disk.paths, disk.load, budget=0)
    disk.reads.clear()
    host.get_ready(["a0", "a1", "a2", "a3"])
    host.take("a1")
    assert set(disk.reads) <= {"a0", "a1"}
    assert len({"a0", "a1"}) == READ_AHEAD
    host.get_ready(["a3", "a4"])
    host.take("a4")
    assert not host.is_ready("a0")
    assert "a2" not in disk.reads


def test_a_file_that_changes_under_a_run_is_refused(tmp_path):
    disk = Disk(tmp_path)
    host = HostAdapters(disk.paths, disk.load, budget=0)
    host.take("a1")
    (tmp_path / "a1" / "adapter_config.json").write_text("{ }")
    host.get_ready(["a1"])
    with pytest.raises(AdapterError, match="changed while the run was under way"):
        host.take("a1")


def block(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def test_an_arena_is_cut_from_blocks_that_grow(monkeypatch):
    monkeypatch.setattr(Arena, "FIRST", 1024)
    monkeypatch.setattr(Arena, "BLOCK", 8192)
    made = []

    def allocate(nbytes):
        made.append(nbytes)
        return block(nbytes)

    memory = Arena(allocate)
    originals = [torch.randn(3, n % 40 + 1).to(dtype) for n in range(60) for dtype in (torch.bfloat16, torch.float32)]
    originals += [torch.randn(900), torch.randn(0, 4), torch.randn(30, 4).T]
    copies = [memory.copy(tensor) for tensor in originals]
    for tensor, copy in zip(originals, copies, strict=True):
        assert copy.dtype == tensor.dtype
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)
    assert made[:4] == [1024, 2048, 4096, 8192]
    assert set(made[4:]) == {3600, 8192}  # what takes over a quarter of a block has its own
    assert sum(made) < 2 * sum(tensor.nbytes for tensor in originals) + 256 * len(originals)
    fresh = Arena(block).empty([5, 300], torch.float16)  # larger than the first block
    assert (fresh.shape, fresh.dtype) == ((5, 300), torch.float16)


def test_threads_share_an_arena():
    memory = Arena(block)
    with ThreadPoolExecutor(8) as pool:
        filled = list(pool.map(lambda i: memory.empty((i % 50 + 1, 1000), torch.int32).fill_(i), range(400)))
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(filled))


def test_what_is_read_again_is_read_into_page_locked_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("moelora.adapters.host.page_locked", block)
    disk = Disk(tmp_path)
    host = HostAdapters(disk.paths, disk.load, budget=0)
    assert disk.memories == [ordinary] * 5
    host.pin(slots=1)
    for name in ("a0", "a3"):
        host.take(name)
    arenas = [allocate.__self__ for allocate in disk.memories[5:]]
    assert len(set(arenas)) == 2  # an adapter's memory goes with it
    assert all(arena._allocate is block for arena in arenas)


def test_what_is_kept_is_copied_into_page_locked_memory_when_its_turn_is_near(tmp_path, monkeypatch):
    copied = []

    def copy(adapter, memory):
        copied.append(adapter.name)
        return replace(adapter, path=Path("locked"))

    monkeypatch.setattr("moelora.adapters.host.pinned", copy)
    disk = Disk(tmp_path)
    host = HostAdapters(disk.paths, disk.load)
    assert host.is_ready("a0")
    host.pin(slots=1)
    assert copied == []
    assert not host.is_ready("a0")
    host.get_ready(["a0", "a1", "a2", "a3"])
    assert [host.take(name).path for name in ("a0", "a1")] == [Path("locked")] * 2
    assert copied == ["a0", "a1"]
    assert not host.is_ready("a0")
    host.get_ready(["a2", "a3"])
    assert host.take("a4").path == Path("locked")  # behind the two that are on their way
    assert copied == ["a0", "a1", "a2", "a3", "a4"]
    assert host.is_ready("a2")
    assert len(disk.reads) == 5  # each once, at the start


def test_copies_are_made_ahead_for_all_slots_and_reads_for_two(tmp_path, monkeypatch):
    monkeypatch.setattr("moelora.adapters.host.pinned", lambda adapter, memory: adapter)
    disk = Disk(tmp_path, 9)
    one = disk.load("a0", disk.paths["a0"], ordinary).nbytes
    host = HostAdapters(disk.paths, disk.load, budget=5 * one)
    kept = [name for name in host if host.is_ready(name)]
    read = [name for name in host if name not in kept]
    assert len(read) > READ_AHEAD
    host.pin(slots=4)
    host.get_ready(kept)
    assert list(host._coming) == kept[:4]
    host.get_ready(read)
    assert list(host._coming) == read[:READ_AHEAD]


@pytest.mark.parametrize("budget", [None, 0], ids=["kept", "read again"])
def test_an_adapter_comes_while_those_before_it_are_used(tmp_path, budget, monkeypatch):
    """Six adapters of five batches each on two slots; none but the first is waited for."""
    monkeypatch.setattr("moelora.adapters.host.pinned", lambda adapter, memory: adapter)
    disk = Disk(tmp_path, 6)
    host = HostAdapters(disk.paths, disk.load, budget=budget)
    host.pin(slots=2)
    bank = AdapterBank(CATALOGUE, BankLayout.of(host.values()), slots=2, device=CPU, dtype=torch.float32)
    residency = Residency(host, bank)
    sequences = [Sequence(request=i, adapter=f"a{i % 6}", token_ids=(0,) * 9, runs=(), top_k=0) for i in range(60)]
    placed = [
        (batch, residency.place(batch))
        for batch in plan(sequences, BatchLimits(max_tokens=20, max_sequences=8, max_adapters=2))
    ]
    waited = []
    for (_, placement), upcoming in look_ahead(placed, 9):
        waited += [n for n, slot in placement.items() if bank.residents[slot] != n and not host.is_ready(n)]
        residency.bring(placement)
        residency.prefetch(placement, [later for _, later in upcoming])
        while not all(coming.done() for coming in host._coming.values()):
            time.sleep(0.001)  # a device would compute meanwhile
        residency.release(placement)
    assert waited == ["a0"]
    assert bank.loads == 6


def test_only_what_lies_on_the_host_is_pinned():
    adapter = make_adapter("x", 3)
    memory = Arena(block)
    copied = pinned(adapter, memory)
    assert copied.factors["q"].a is not adapter.factors["q"].a
    assert torch.equal(copied.factors["q"].a, adapter.factors["q"].a)
    elsewhere = outline(adapter)
    assert pinned(elsewhere, memory).factors["q"].a is elsewhere.factors["q"].a


def test_free_host_memory_heeds_containers(tmp_path):
    assert free_host_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert free_host_memory(tmp_path) == 4 << 20
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) == 4 << 20
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("2500000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    assert free_host_memory(tmp_path) == 500_100


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
