"""Seconds to load one per-expert adapter of a large model: 36,864 tensors of experts, from page cache.

Onto the host, and with a CUDA device on into a slot there. The first load of a process stands by itself: it makes the
memory that later ones find made. Loads by one that has planned such an adapter before, as a run loads all but its
first; one load by part, and what copies alone take.

    python benchmarks/bench_adapter_load.py [--shape FOLDER] [--rank 16] [--layers N] [--folder FOLDER] [--workers N]

Makes the adapter once in a temporary folder (or in --folder, which is then kept). Some targets are compared with the
tensors of the file, product by product, as they came onto the host and into the slot.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moelora.adapters import values
from moelora.adapters.arena import Allocate, Arena, ordinary, page_locked
from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter, Catalogue, Factors
from moelora.adapters.files import WEIGHTS_NAME, TensorReader
from moelora.adapters.loader import AdapterLoader
from moelora.adapters.plans import Plans
from moelora.adapters.values import extremes
from moelora.bench.run import cut_to_layers
from moelora.environment import collector_paused, cpu_count, one_core_threads
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue

SHAPES = Path(__file__).parent / "shapes"
PREFIX = "base_model.model."
ALPHA = 32
CHUNK = 4 << 20


def main() -> None:
    """Prints seconds and gigabytes per second: the first load, each repeat, one load by part, floors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=SHAPES / "Qwen3-30B-A3B")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the adapter is made, or found from an earlier run")
    parser.add_argument("--workers", type=int, default=values.MOST_WORKERS, help="threads that read values, at most")
    parser.add_argument("--profile", action="store_true", help="the functions that take longest, after the times")
    options = parser.parse_args()
    values.MOST_WORKERS = options.workers
    with cut_to_layers(options.shape, options.layers, "dummy") as shape, tempfile.TemporaryDirectory() as made:
        catalogue = build_catalogue(open_base(shape, load_format="dummy").skeleton())
        folder = options.folder or Path(made)
        if not (folder / WEIGHTS_NAME).exists():
            write_adapter(folder, catalogue, options.rank)
        bench = Bench(folder, catalogue)
        print(bench.headline(), flush=True)
        kinds: list[tuple[str, Callable[[], Allocate]]] = [("ordinary memory", lambda: ordinary)]
        if torch.cuda.is_available():
            kinds.append(("page-locked memory", lambda: Arena(page_locked).empty))
        for kind, memory in kinds:
            print(f"into {kind}, {bench.line(bench.load(memory))}: the first of the process", flush=True)
            bench.check()
            for _ in range(options.repeat):
                print(f"into {kind}, {bench.line(bench.load(memory))}", flush=True)
            for _ in range(options.repeat):
                print(f"into {kind}, {bench.line(bench.load(memory, bench.loader))}: planned before", flush=True)
            bench.check()
        print_parts("one load by part, median", bench.parts(kinds[-1][1], options.repeat))
        print_parts("values in one thread, into memory that was used before", bench.values_in_one_thread())
        print_parts("copies alone", bench.floors())
        if options.profile:
            profiler = cProfile.Profile()
            profiler.runcall(bench.load, kinds[-1][1])
            pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def print_parts(title: str, parts: dict[str, float]) -> None:
    """A line for each part."""
    print(f"{title}:")
    for name, seconds in parts.items():
        print(f"  {seconds:7.3f} s  {name}", flush=True)


class Bench:
    """One adapter in a folder, and one slot of a bank on the CUDA device if there is one."""

    def __init__(self, folder: Path, catalogue: Catalogue) -> None:
        self.folder = folder
        self.catalogue = catalogue
        self.adapter: Adapter | None = None
        self.threads = min(values.MOST_WORKERS, cpu_count())
        self.size = (folder / WEIGHTS_NAME).stat().st_size
        self.loader = AdapterLoader(catalogue, dtype=torch.bfloat16)
        outline = self.loader.outline(folder, name="bench")
        self.canonical = outline.nbytes
        self.bank: AdapterBank | None = None
        if torch.cuda.is_available():
            layout, device = BankLayout.of([outline]), torch.device("cuda")
            self.bank = AdapterBank(catalogue, layout, slots=1, device=device, dtype=torch.bfloat16)
            torch.cuda.synchronize()

    def headline(self) -> str:
        """What is loaded, and by how many threads."""
        with safe_open(self.folder / WEIGHTS_NAME, "pt") as file:
            count = len(file.keys())
        with (self.folder / WEIGHTS_NAME).open("rb") as file:  # into the page cache
            while file.read(CHUNK):
                pass
        return (
            f"{count:,} tensors, {self.size / 1e9:.2f} GB, {self.canonical / 1e9:.2f} in canonical form; "
            f"{self.threads} threads of {cpu_count()} cores"
        )

    def line(self, seconds: tuple[float, float]) -> str:
        """Seconds onto the host and into the slot, and the bytes of the file per second."""
        places = ("onto the host", "into its slot")[: 1 if self.bank is None else 2]
        return "; ".join(
            f"{s:.2f} s, {self.size / 1e9 / s:.2f} GB/s {p}" for s, p in zip(seconds, places, strict=False)
        )

    def load(self, memory: Callable[[], Allocate], loader: AdapterLoader | None = None) -> tuple[float, float]:
        """Loads the adapter as a run does; seconds until it is on the host, and until it is in the slot.

        loader: None takes a new one, which has planned nothing yet.
        """
        self.adapter = None  # page-locked memory goes back to torch, which gives it to the next
        began = time.perf_counter()
        loader = loader or AdapterLoader(self.catalogue, dtype=torch.bfloat16)
        self.adapter = loader.load(self.folder, name="bench", allocate=memory())
        on_host = time.perf_counter() - began
        if self.bank is not None:
            self.bank.load(0, self.adapter)
            torch.cuda.synchronize()
        return on_host, time.perf_counter() - began

    def parts(self, memory: Callable[[], Allocate], repeat: int) -> dict[str, float]:
        """Median seconds of what a load does one after the other."""
        seconds = [self._parts_of_one(memory) for _ in range(repeat)]
        return {name: statistics.median(one[name] for one in seconds) for name in seconds[0]}

    def _parts_of_one(self, memory: Callable[[], Allocate]) -> dict[str, float]:
        with collector_paused():
            began = time.perf_counter()
            plans = Plans(self.catalogue)
            file = plans.read(self.folder)
            read = time.perf_counter()
            plans.plan(file)
            planned = time.perf_counter()
            del plans, file
        on_host, in_slot = self.load(memory)
        parts = {
            "config and headers": read - began,
            "names: what each tensor is, and whether it fits": planned - read,
            f"values, by {self.threads} threads: read, scaled, checked": on_host - (planned - began),
        }
        return parts if self.bank is None else {**parts, "copies into the slot": in_slot - on_host}

    def values_in_one_thread(self) -> dict[str, float]:
        """Seconds of one thread over all targets."""
        assert self.adapter is not None
        plans = Plans(self.catalogue)
        file = plans.read(self.folder)
        reading = checking = 0.0
        with one_core_threads(1) as pool, TensorReader(file.path, file.stamps) as reader:
            for plan in plans.plan(file).plans:
                factors = self.adapter.factors[plan.target.name]
                began = time.perf_counter()
                pool.submit(plan.fill, reader, factors.a, factors.b).result()
                read = time.perf_counter()
                pool.submit(extremes, factors.a).result()
                pool.submit(extremes, factors.b).result()
                reading += read - began
                checking += time.perf_counter() - read
        return {"read and scaled": reading, "checked": checking}

    def floors(self) -> dict[str, float]:
        """Seconds that the bytes take by themselves."""
        path = self.folder / WEIGHTS_NAME
        source = torch.from_file(str(path), size=self.size, dtype=torch.uint8)
        room = ordinary([self.size], torch.uint8)

        def copy(place: int) -> None:
            room[place : place + CHUNK].copy_(source[place : place + CHUNK])

        found = {}
        places = range(0, self.size, CHUNK)
        for threads in sorted({1, self.threads}):
            with one_core_threads(threads) as pool:
                for _ in range(2):  # the second time into memory that is there, from a file that is mapped
                    began = time.perf_counter()
                    list(pool.map(copy, places))
                    found[f"the file, by {threads} thread{'s' if threads > 1 else ''}"] = time.perf_counter() - began
        if self.bank is not None:
            locked = page_locked(16 * CHUNK)
            on_device = torch.empty_like(locked, device="cuda")
            on_device.copy_(locked, non_blocking=True)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(self.canonical // len(locked)):
                on_device.copy_(locked, non_blocking=True)
            torch.cuda.synchronize()
            found["its canonical form onto the device, from page-locked memory"] = time.perf_counter() - began
        return found

    def check(self) -> None:
        """Compares the deltas of a few experts of every layer with the products of the file's own tensors."""
        assert self.adapter is not None
        found = dict(self.adapter.factors)
        if self.bank is not None:
            for name, slots in self.bank.slots.items():
                if self.catalogue.targets[name].num_experts:
                    found[name] = Factors(a=slots.a_LERI[0].cpu(), b=slots.b_LEOR[0].cpu())
        for factors in (self.adapter.factors, found):
            check(factors, self.folder, self.catalogue)


def write_adapter(folder: Path, catalogue: Catalogue, rank: int) -> None:
    """Random factors in PEFT's per-expert names for q, k, v, o and the three projections of every expert."""
    folder.mkdir(exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}

    def add(module: str, into: int, out: int) -> None:
        for name, shape in (("lora_A", (rank, into)), ("lora_B", (out, rank))):
            tensors[f"{PREFIX}{module}.{name}.weight"] = torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1)

    for target in catalogue:
        path, _, leaf = target.name.rpartition(".")
        if leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            add(target.name, target.in_features, target.out_features)
        for expert in range(target.num_experts):
            for part in ("gate_proj", "up_proj") if target.gated else ("down_proj",):
                out = target.out_features // 2 if target.gated else target.out_features
                add(f"{path}.{expert}.{part}", target.in_features, out)
    save_file(tensors, folder / WEIGHTS_NAME)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def check(found: Mapping[str, Factors], folder: Path, catalogue: Catalogue) -> None:
    """Compares the deltas of a few experts of every layer with the products of the file's own tensors."""
    draw = random.Random(0)
    with safe_open(folder / WEIGHTS_NAME, "pt") as file:
        for target in (t for t in catalogue if t.num_experts):
            path, factors = target.name.rpartition(".")[0], found[target.name]
            for expert in draw.sample(range(target.num_experts), 2):
                parts = ("gate_proj", "up_proj") if target.gated else ("down_proj",)
                wanted = []
                for part in parts:
                    module = f"{PREFIX}{path}.{expert}.{part}"
                    a, b = (file.get_tensor(f"{module}.lora_{side}.weight").float() for side in "AB")
                    rank = a.shape[0]
                    wanted.append((b * (ALPHA / rank)).to(torch.bfloat16).float() @ a)
                delta = factors.b[expert].float() @ factors.a[expert].float()
                torch.testing.assert_close(delta, torch.cat(wanted), atol=1e-3, rtol=1e-5)


if __name__ == "__main__":
    main()
