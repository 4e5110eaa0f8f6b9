"""Many adapters on few slots against one adapter: the same rows, shuffled, through `moelora prefill`.

`python benchmarks/bench_many_adapters.py` runs 50 adapters of rank 16 on 4 slots of four layers of Qwen3-30B-A3B with
dummy weights, and prints seconds of scoring and of loading for both runs, their ratio, and how often adapters were
loaded. `--model` and `--device cpu` try it on a small model without a GPU. Adapters are a few files under many names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file

from moelora.bench.dummy_adapters import dummy_adapters
from moelora.bench.run import cut_to_layers
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue

DISTINCT = 3
"""Adapters that are written; the others are links to them."""


def write_adapters(folder: Path, model: Path, count: int, rank: int) -> None:
    """`count` folders a00, a01, … of random bf16 factors."""
    catalogue = build_catalogue(open_base(model, load_format="dummy").skeleton())
    made = dummy_adapters(catalogue, count=DISTINCT, rank=rank, device=torch.device("cpu"), dtype=torch.bfloat16)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    for i in range(count):
        own = folder / f"a{i:02}"
        own.mkdir(parents=True)
        (own / "adapter_config.json").write_text(json.dumps(config))
        weights = own / "adapter_model.safetensors"
        if i >= DISTINCT:
            os.link(folder / f"a{i % DISTINCT:02}" / weights.name, weights)
            continue
        tensors = {}
        for name, factors in made[f"dummy-{i}"].factors.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = factors.a.clone()
            tensors[f"base_model.model.{name}.lora_B.weight"] = factors.b.clone()
        save_file(tensors, weights)


def write_rows(path: Path, names: list[str], rows: int, longest: int, vocab_size: int) -> None:
    """The same prompts whatever `names` are; each row names one adapter, and neighbours seldom the same."""
    draw, choose = random.Random(0), random.Random(1)
    with path.open("w") as file:
        for i in range(rows):
            ids = draw.choices(range(vocab_size), k=draw.randint(longest // 3, longest))
            row = {"id": f"r{i}", "prompt_token_ids": ids, "adapter": choose.choice(names)}
            file.write(json.dumps(row) + "\n")


def prefill(model: Path, folder: Path, adapters: Path, name: str, arguments: list[str]) -> dict:
    """The report of one run."""
    report = folder / f"{name}.report.json"
    command = [sys.executable, "-m", "moelora_cli", "prefill", model, "--load-format", "dummy", "--adapters", adapters]
    command += ["--input", folder / f"{name}.jsonl", "--output", folder / f"{name}.out.jsonl", "--report", report]
    subprocess.run([*map(str, command), "--quiet", *arguments], check=True)
    return json.loads(report.read_text())


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = Path(__file__).parent / "shapes" / "Qwen3-30B-A3B"
    parse.add_argument("--model", type=Path, default=shape, help="folder with a config")
    parse.add_argument("--layers", type=int, default=4, help="0: all of them")
    parse.add_argument("--adapters", type=int, default=50)
    parse.add_argument("--slots", type=int, default=4)
    parse.add_argument("--rank", type=int, default=16)
    parse.add_argument("--rows", type=int, default=8000)
    parse.add_argument("--longest", type=int, default=768, help="tokens; the shortest prompts have a third of it")
    parse.add_argument("--device", default="auto")
    parse.add_argument("--buckets", default="1024,2048,4096,8192", help="few, so that capture is quick")
    args = parse.parse_args()
    cut = cut_to_layers(args.model, args.layers, "dummy") if args.layers else nullcontext(args.model)
    with tempfile.TemporaryDirectory() as temporary, cut as model:
        folder = Path(temporary)
        config = json.loads((model / "config.json").read_text())
        write_adapters(folder / "many", model, args.adapters, args.rank)
        write_adapters(folder / "one", model, 1, args.rank)
        options = ["--slots", str(args.slots), "--device", args.device, "--max-tokens", "8192"]
        options += ["--buckets", args.buckets]
        names = sorted(p.name for p in (folder / "many").iterdir())
        write_rows(folder / "one.jsonl", names[:1], args.rows, args.longest, config["vocab_size"])
        write_rows(folder / "many.jsonl", names, args.rows, args.longest, config["vocab_size"])
        one = prefill(model, folder, folder / "one", "one", options)
        many = prefill(model, folder, folder / "many", "many", options)
    for label, report in (("1 adapter", one), (f"{args.adapters} adapters", many)):
        engine = report["engine"]
        print(
            f"{label:<12} {report['seconds']:7.2f} s scoring {report['tokens']:,} tokens "
            f"({report['tokens_per_second']:,.0f}/s), {report['load_seconds']:6.2f} s loading; "
            f"{engine['adapter_loads']} loads into {engine['slots']} slots, "
            f"{engine['bytes_per_slot'] / 2**20:.1f} MiB each"
        )
    print(f"ratio        {many['seconds'] / one['seconds']:.3f}")


if __name__ == "__main__":
    main()
