"""Adapters in host memory: what is kept, what is read again and when, and the page-locked memory it comes to."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moelora import AdapterError
from moelora.adapters.arena import Arena, ordinary
from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter
from moelora.adapters.host import READ_AHEAD, READ_AT_START, HostAdapters, outline, pinned
from moelora.adapters.residency import Residency
from moelora.batching.planner import BatchLimits, plan
from moelora.batching.sequences import Sequence
from moelora.batching.slots import look_ahead
from small_bank import CATALOGUE, make_adapter

CPU = torch.device("cpu")
NAMES = [f"a{i}" for i in range(40)]


class Disk:
    """Adapters on a disk, and how often each was read and checked."""

    def __init__(self, folder: Path, count: int = 5):
        self.paths = {}
        self.reads = []
        self.checks = []
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

    def check(self, name, path):
        self.checks.append(name)
        made = outline(make_adapter(name, 4 * int(name[1:])))
        return Adapter(name=name, path=self.paths[name], factors=made.factors)


def test_what_fits_is_kept_and_the_rest_is_read_again(tmp_path):
    disk, said = Disk(tmp_path), []
    one = disk.check("a0", disk.paths["a0"]).nbytes
    disk.checks.clear()
    host = HostAdapters(disk.paths, disk.load, disk.check, budget=3 * one, say=said.append)
    assert list(host) == [f"a{i}" for i in range(5)]
    assert (disk.reads, disk.checks) == (["a0", "a1", "a2", "a3"], ["a4"])
    assert 0 < host.kept < 4
    assert f"{host.kept} of 5 adapters stay in host memory" in said[-1]
    assert all(f.a.is_meta and f.b.is_meta for adapter in host.values() for f in adapter.factors.values())
    kept = [name for name in host if host.is_ready(name)]
    assert len(kept) == host.kept
    disk.reads.clear()
    for name in host:
        assert torch.equal(host.take(name).factors["q"].a, make_adapter(name, 4 * int(name[1:])).factors["q"].a)
    assert disk.reads == [name for name in host if name not in kept]


def test_the_first_are_read_and_the_others_checked_and_each_is_read_once_in_its_turn(tmp_path):
    disk = Disk(tmp_path, 12)
    host = HostAdapters(disk.paths, disk.load, disk.check)
    first, others = list(disk.paths)[:READ_AT_START], list(disk.paths)[READ_AT_START:]
    assert (disk.reads, sorted(disk.checks)) == (first, sorted(others))
    assert list(host) == [*first, *others]
    assert host.kept == 12
    assert [name for name in host if host.is_ready(name)] == first
    disk.reads.clear()
    order = [*reversed(others), *others]
    for i, name in enumerate(order):
        host.get_ready(order[i:])
        expected = make_adapter(name, 4 * int(name[1:]))
        assert torch.equal(host.take(name).factors["q"].b, expected.factors["q"].b)
    assert disk.reads == list(reversed(others))
    assert all(host.is_ready(name) for name in host)
    assert not host._coming


@pytest.mark.parametrize("bad", [("a1",), ("a10",), ("a1", "a3"), ("a2", "a9"), ("a9", "a10", "a35"), tuple(NAMES)])
def test_all_bad_adapters_are_refused_at_once_in_their_order(tmp_path, bad):
    disk = Disk(tmp_path, len(NAMES))

    def load(name, path, allocate):
        if name in bad:
            time.sleep(0.05 if name == bad[0] else 0)
            raise AdapterError(f"{name} is bad\n  - twice")
        return disk.check(name, path)

    told = "".join(f"\n  - {name} is bad\n    - twice" for name in bad[:8])
    said = f"{len(bad)} of {len(NAMES)} adapters are refused{told}" if len(bad) > 1 else f"{bad[0]} is bad\n  - twice"
    said += f"\n  - … and {len(bad) - 8} more" if len(bad) > 8 else ""
    with pytest.raises(AdapterError, match=f"^{re.escape(said)}$"):
        HostAdapters(disk.paths, load, lambda name, path: load(name, path, ordinary))


def test_an_adapter_in_memory_is_kept_as_it_is(tmp_path):
    disk, own = Disk(tmp_path, 2), make_adapter("own", 3)
    host = HostAdapters({**disk.paths, "own": own}, disk.load, disk.check, budget=0)
    assert list(host) == ["a0", "a1", "own"]
    assert host.kept == 1
    assert host.take("own") is own


def test_reading_ahead_is_bounded_and_lets_go_of_what_is_no_longer_wanted(tmp_path):
    disk = Disk(tmp_path)
    host = HostAdapters(disk.paths, disk.load, disk.check, budget=0)
    disk.reads.clear()
    host.get_ready(["a0", "a1", "a2", "a3"])
    host.take("a1")
    assert set(disk.reads) <= {"a0", "a1"}
    assert len({"a0", "a1"}) == READ_AHEAD
    host.get_ready(["a3", "a4"])
    host.take("a4")
    assert not host.is_ready("a0")
    assert "a2" not in disk.reads


@pytest.mark.parametrize(("name", "budget"), [("a1", 0), ("a4", 0), ("a4", None)])
def test_a_file_that_changes_under_a_run_is_refused(tmp_path, name, budget):
    disk = Disk(tmp_path)
    host = HostAdapters(disk.paths, disk.load, disk.check, budget=budget)
    if budget == 0:
        host.take(name)
    (tmp_path / name / "adapter_config.json").write_text("{ }")
    host.get_ready([name])
    for _ in range(2):
        with pytest.raises(AdapterError, match=f"{name}: changed while the run was under way"):
            host.take(name)


def test_a_file_that_changes_beside_a_link_to_nowhere_is_refused(tmp_path):
    disk = Disk(tmp_path)
    (tmp_path / "a1" / "link.json").symlink_to("nowhere")
    host = HostAdapters(disk.paths, disk.load, disk.check, budget=0)
    (tmp_path / "a1" / "adapter_config.json").write_text("{ }")
    with pytest.raises(AdapterError, match="a1: changed while the run was under way"):
        host.take("a1")


@pytest.mark.parametrize("changing", ["a2", "a4"], ids=["read", "checked"])
def test_a_file_that_changes_while_it_is_first_looked_at_is_refused(tmp_path, changing):
    """Its configuration may be of the old adapter and its tensors of the new one."""
    disk = Disk(tmp_path)

    def load(name, path, allocate):
        adapter = disk.load(name, path, allocate)
        if name == changing:
            (path / "adapter_config.json").write_text("{ }")
        return adapter

    with pytest.raises(AdapterError, match=f"{changing}: changed while the run was under way"):
        HostAdapters(disk.paths, load, lambda name, path: load(name, path, ordinary))


def test_what_is_written_beside_an_adapter_is_no_change(tmp_path):
    disk = Disk(tmp_path)
    host = HostAdapters(disk.paths, disk.load, disk.check, budget=0)
    (tmp_path / "a1" / "training.log").write_text("step 7")
    assert host.take("a1").name == "a1"


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
    host = HostAdapters(disk.paths, disk.load, disk.check, budget=0)
    assert disk.memories == [ordinary] * READ_AT_START
    host.pin(slots=1)
    for name in ("a0", "a4"):
        host.take(name)
    arenas = [allocate.__self__ for allocate in disk.memories[READ_AT_START:]]
    assert len(set(arenas)) == 2  # an adapter's memory goes with it
    assert all(arena._allocate is block for arena in arenas)


def test_what_is_kept_is_copied_into_page_locked_memory_when_its_turn_is_near(tmp_path, monkeypatch):
    copied = []

    def copy(adapter, memory):
        copied.append(adapter.name)
        return replace(adapter, path=Path("locked"))

    monkeypatch.setattr("moelora.adapters.host.pinned", copy)
    disk = Disk(tmp_path)
    host = HostAdapters(disk.paths, disk.load, disk.check)
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
    assert disk.reads == ["a0", "a1", "a2", "a3", "a4"]  # each once


def test_copies_are_made_ahead_for_all_slots_and_reads_for_two(tmp_path, monkeypatch):
    monkeypatch.setattr("moelora.adapters.host.pinned", lambda adapter, memory: adapter)
    disk = Disk(tmp_path, 9)
    one = disk.load("a0", disk.paths["a0"], ordinary).nbytes
    host = HostAdapters(disk.paths, disk.load, disk.check, budget=5 * one)
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
    host = HostAdapters(disk.paths, disk.load, disk.check, budget=budget)
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
