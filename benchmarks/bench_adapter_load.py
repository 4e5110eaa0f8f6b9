"""Seconds to load one per-expert adapter of a large model: 36,864 tensors of experts, from page cache.

Onto the host, and with a CUDA device on into a slot there.

    python benchmarks/bench_adapter_load.py [--shape FOLDER] [--rank 16] [--layers N] [--folder FOLDER] [--profile]

Makes the adapter once in a temporary folder (or in --folder, which is then kept). Before any time is reported, some
targets are compared with the tensors of the file, product by product.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter, Catalogue
from moelora.adapters.files import WEIGHTS_NAME
from moelora.adapters.loader import load_adapter
from moelora.bench.run import cut_to_layers
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue

SHAPES = Path(__file__).parent / "shapes"
PREFIX = "base_model.model."
ALPHA = 32


def main() -> None:
    """Prints seconds and gigabytes per second of each repeat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=SHAPES / "Qwen3-30B-A3B")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the adapter is made, or found from an earlier run")
    parser.add_argument("--profile", action="store_true", help="the functions that take longest, after the times")
    options = parser.parse_args()
    with cut_to_layers(options.shape, options.layers, "dummy") as shape, tempfile.TemporaryDirectory() as made:
        catalogue = build_catalogue(open_base(shape, load_format="dummy").skeleton())
        folder = options.folder or Path(made)
        if not (folder / WEIGHTS_NAME).exists():
            write_adapter(folder, catalogue, options.rank)
        adapter = load(folder, catalogue)
        check(adapter, folder, catalogue)
        size = (folder / WEIGHTS_NAME).stat().st_size
        with safe_open(folder / WEIGHTS_NAME, "pt") as file:
            print(f"{len(file.keys()):,} tensors, {size / 1e9:.2f} GB, {torch.get_num_threads()} threads")
        slot = Slot(adapter, catalogue) if torch.cuda.is_available() else None
        for _ in range(options.repeat):
            began = time.perf_counter()
            adapter = load(folder, catalogue)
            seconds = time.perf_counter() - began
            line = f"{seconds:.2f} s, {size / 1e9 / seconds:.2f} GB/s onto the host"
            if slot is not None:
                slot.fill(adapter)
                seconds = time.perf_counter() - began
                line += f"; {seconds:.2f} s, {size / 1e9 / seconds:.2f} GB/s into its slot"
            print(line)
        if options.profile:
            profiler = cProfile.Profile()
            profiler.runcall(load, folder, catalogue)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


class Slot:
    """One slot of a bank on the CUDA device."""

    def __init__(self, adapter: Adapter, catalogue: Catalogue) -> None:
        device = torch.device("cuda")
        self._bank = AdapterBank(catalogue, BankLayout.of([adapter]), slots=1, device=device, dtype=torch.bfloat16)
        self.fill(adapter)

    def fill(self, adapter: Adapter) -> None:
        """Copies an adapter in, and waits until it is there."""
        self._bank.load(0, adapter)
        torch.cuda.synchronize()


def load(folder: Path, catalogue: Catalogue) -> Adapter:
    """The adapter as a run loads it."""
    return load_adapter(folder, name="bench", catalogue=catalogue, dtype=torch.bfloat16)


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


def check(adapter: Adapter, folder: Path, catalogue: Catalogue) -> None:
    """Compares the deltas of a few experts of every layer with the products of the file's own tensors."""
    draw = random.Random(0)
    with safe_open(folder / WEIGHTS_NAME, "pt") as file:
        for target in (t for t in catalogue if t.num_experts):
            path, factors = target.name.rpartition(".")[0], adapter.factors[target.name]
            for expert in draw.sample(range(target.num_experts), 2):
                parts = ("gate_proj", "up_proj") if target.gated else ("down_proj",)
                wanted = []
                for part in parts:
                    module = f"{PREFIX}{path}.{expert}.{part}"
                    a, b = (file.get_tensor(f"{module}.lora_{side}.weight").float() for side in "AB")
                    rank = a.shape[0]
                    wanted.append((b * (ALPHA / rank)).to(torch.bfloat16).float() @ a)
                found = factors.b[expert].float() @ factors.a[expert].float()
                torch.testing.assert_close(found, torch.cat(wanted), atol=1e-3, rtol=1e-5)


if __name__ == "__main__":
    main()
