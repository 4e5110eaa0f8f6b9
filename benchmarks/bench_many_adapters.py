"""Many adapters on few slots against one adapter: the same rows, shuffled, through `moelora prefill`.

`python benchmarks/bench_many_adapters.py` runs 50 adapters of rank 16 on 4 slots of four layers of Qwen3-30B-A3B with
dummy weights, in one process: a few rows, which compiles kernels; all rows under one adapter; each row under one of all
of them. It prints what it is at, and at the end the seconds of either run by part, their ratios, and how often adapters
were loaded.
`--model` and `--device cpu` try it on a small model without a GPU. Adapters are a few files under many names.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from moelora.bench.dummy_adapters import dummy_adapters
from moelora.bench.run import cut_to_layers
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from moelora_cli.main import main as moelora

DISTINCT = 3
"""Adapters that are written; the others are links to them."""
LIMIT = 1.15
"""What many adapters may cost, as a ratio of wall times."""

_BEGAN = time.monotonic()


def say(text: str) -> None:
    """A line with the seconds since the start, at once."""
    print(f"{time.monotonic() - _BEGAN:6.1f} s  {text}", flush=True)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the command. Seconds: wall of all of it, of scoring and writing, of all that comes before."""

    wall: float
    scoring: float
    loading: float
    report: dict

    def describe(self) -> str:
        """Two lines."""
        engine = self.report["engine"]
        return (
            f"{self.wall:.2f} s: {self.loading:.2f} loading, {self.scoring:.2f} scoring {self.report['tokens']:,} "
            f"tokens ({self.report['tokens'] / self.scoring:,.0f}/s)\n"
            f"          {engine['adapter_loads']} loads of {engine['adapters']} adapters into {engine['slots']} slots "
            f"of {engine['bytes_per_slot'] / 1e6:.1f} MB; {engine['adapters_kept_on_host']} kept in host memory"
        )


def prefill(model: Path, folder: Path, name: str, adapters: Path, arguments: list[str]) -> Run:
    """Runs the command in this process, which keeps imports and compiled kernels; its progress goes to stderr."""
    report = folder / f"{name}.report.json"
    files = ["--input", folder / f"{name}.jsonl", "--output", folder / f"{name}.out.jsonl", "--report", report]
    command = ["prefill", model, "--load-format", "dummy", "--adapters", adapters, *files, *arguments]
    began = time.monotonic()
    code: object = None
    try:
        moelora([*map(str, command)])
    except SystemExit as end:
        code = end.code
    assert code == 0, f"exit {code}"
    wall = time.monotonic() - began
    gc.unfreeze()  # the command freezes what it has made, for it expects to end with it
    gc.collect()
    found = json.loads(report.read_text())
    return Run(wall=wall, scoring=found["seconds"], loading=found["load_seconds"], report=found)


def compare(one: Run, many: Run) -> None:
    """Both runs by part, and the ratios."""
    count, loads = (many.report["engine"][key] for key in ("adapters", "adapter_loads"))
    say(f"one adapter: {one.describe()}")
    say(f"{count} adapters: {many.describe()}")
    say(f"adapter loads per pass: {loads} of {count} adapters")
    more = many.loading - one.loading
    size = (count - 1) * many.report["engine"]["bytes_per_slot"]
    say(f"loading {count - 1} adapters more: {more:.2f} s, {size / 1e9 / max(more, 1e-9):.1f} GB/s")
    say(f"ratio of scoring alone: {many.scoring / one.scoring:.3f}")
    say(f"ratio of wall times: {many.wall / one.wall:.3f}, at most {LIMIT}")


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = Path(__file__).parent / "shapes" / "Qwen3-30B-A3B"
    parse.add_argument("--model", type=Path, default=shape, help="folder with a config")
    parse.add_argument("--layers", type=int, default=4, help="0: all of them")
    parse.add_argument("--adapters", type=int, default=50)
    parse.add_argument("--slots", type=int, default=4)
    parse.add_argument("--rank", type=int, default=16)
    parse.add_argument("--rows", type=int, default=6000)
    parse.add_argument("--longest", type=int, default=768, help="tokens; the shortest prompts have a third of it")
    parse.add_argument("--device", default="auto")
    parse.add_argument("--buckets", default="4096,8192", help="few, so that capture is quick")
    args = parse.parse_args()
    cut = cut_to_layers(args.model, args.layers, "dummy") if args.layers else nullcontext(args.model)
    with tempfile.TemporaryDirectory() as temporary, cut as model:
        folder = Path(temporary)
        config = json.loads((model / "config.json").read_text())
        say(f"imported; writing {args.adapters} adapters")
        write_adapters(folder / "many", model, args.adapters, args.rank)
        names = sorted(p.name for p in (folder / "many").iterdir())
        (folder / "one").mkdir()
        (folder / "one" / names[0]).symlink_to(folder / "many" / names[0])
        say(f"writing {args.rows} rows, twice")
        for run, chosen, rows in (
            ("first-one", names[:1], 16),
            ("first-many", names[: args.slots], 16),
            ("one", names[:1], args.rows),
            ("many", names, args.rows),
        ):
            write_rows(folder / f"{run}.jsonl", chosen, rows, args.longest, config["vocab_size"])
        options = ["--slots", str(args.slots), "--device", args.device, "--max-tokens", "8192"]
        options += ["--buckets", args.buckets]
        say("a few rows first, which compiles kernels: those for one slot, and those for several")
        for run in ("one", "many"):
            say(prefill(model, folder, f"first-{run}", folder / run, options).describe())
        say("all rows under one adapter")
        one = prefill(model, folder, "one", folder / "one", options)
        say(f"all rows under {args.adapters} adapters")
        many = prefill(model, folder, "many", folder / "many", options)
    compare(one, many)


if __name__ == "__main__":
    main()
