"""What a run finds out about its machine, and the threads it makes there."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from moelora.environment import collector_paused, device_of_place, free_host_memory, one_core_threads


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


def test_each_place_has_a_gpu_of_its_own_where_there_are_enough(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [device_of_place(n) for n in range(3)] == ["cuda:0", "cuda:1", "auto"]


def test_the_collector_is_paused_until_the_last_pause_ends():
    """Those of two threads need not lie within one another: an adapter is read, a graph captured elsewhere."""
    assert gc.isenabled()
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused(), collector_paused():
            pass
        assert not gc.isenabled(), "as it was before"
    finally:
        gc.enable()


def test_pools_that_begin_together_leave_the_number_of_threads_alone() -> None:
    """torch has a number for threads to come: what one pool sets for its own must never reach another's."""
    wanted = torch.get_num_threads() + 2
    inside: list[int] = []

    def run() -> None:
        with one_core_threads(3) as pool:
            inside.extend(pool.map(lambda _: torch.get_num_threads(), range(9)))

    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        for _ in range(5):
            callers = [threading.Thread(target=run) for _ in range(4)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
            with ThreadPoolExecutor(1) as fresh:
                assert fresh.submit(torch.get_num_threads).result() == torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)
    assert set(inside) == {1}
