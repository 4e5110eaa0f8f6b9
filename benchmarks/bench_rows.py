"""A million short rows through `moelora prefill`: does memory stay flat, and what do reading and writing cost?

`python benchmarks/bench_rows.py` runs a tiny model of random weights on whatever device there is, watches the memory of
the process (Linux), and then times reading alone (lines to checked rows) and writing alone (rows to lines on disk, and
the parts put together) on the same files. `--rows` and `--shape` change the size of the input and of the model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoConfig

from moelora.jobs.reader import open_rows
from moelora.jobs.rows import parse_rows
from moelora.jobs.writer import AtomicFile, encode_row

SHAPES = {
    "tiny": {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8},
    "small": {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 32},
}


def write_model(folder: Path, shape: str) -> None:
    """A config alone; weights are made at load."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=1000, tie_word_embeddings=False, **sizes, **SHAPES[shape])
    config.save_pretrained(folder)


def write_rows(path: Path, count: int) -> None:
    """Prompts of 4 to 12 tokens with an id each."""
    draw = random.Random(0)
    with path.open("w") as file:
        for i in range(count):
            ids = draw.choices(range(1000), k=draw.randint(4, 12))
            file.write(f'{{"id": "row-{i}", "prompt_token_ids": {ids}}}\n')


def resident(process: int) -> int:
    """Bytes of memory that a process holds; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def run(model: Path, rows: Path, output: Path, report: Path, device: str) -> list[tuple[int, int]]:
    """Runs the command; returns (parts finished, resident bytes) about twice a second."""
    arguments = ["prefill", model, "--load-format", "dummy", "--input", rows, "--output", output, "--report", report]
    command = [sys.executable, "-m", "moelora_cli", *map(str, arguments), "--device", device, "--quiet"]
    seen = []
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(0.5)
            seen.append((len(list(output.with_name(output.name + ".parts").glob("part-*"))), resident(process.pid)))
    assert process.returncode == 0, f"exit {process.returncode}"
    return seen


def reading_seconds(rows: Path) -> float:
    """Lines to checked rows."""
    began = time.perf_counter()
    with open_rows(rows) as lines:
        for _ in parse_rows(lines):
            pass
    return time.perf_counter() - began


def writing_seconds(output: Path, again: Path) -> float:
    """Rows to lines, into a part, and from there into the output."""
    written = [json.loads(line) for line in output.open("rb")]
    began = time.perf_counter()
    with AtomicFile(again) as part:
        for row in written:
            part.write(encode_row(row))
    with AtomicFile(again) as whole, again.open("rb") as part_file:
        for line in part_file:
            whole.write(line)
    return time.perf_counter() - began


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--rows", type=int, default=1_000_000)
    parse.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parse.add_argument("--device", default="auto")
    args = parse.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", args.shape)
        write_rows(folder / "rows.jsonl", args.rows)
        output, report_file = folder / "out.jsonl", folder / "report.json"
        seen = run(folder / "model", folder / "rows.jsonl", output, report_file, args.device)
        report = json.loads(report_file.read_text())
        reading, writing = reading_seconds(folder / "rows.jsonl"), writing_seconds(output, folder / "again.jsonl")
        lines = sum(1 for _ in output.open("rb"))
    parts = max(count for count, _ in seen)
    early, late = (max((held for count, held in seen if count <= n), default=0) for n in (max(parts // 10, 1), parts))
    print(f"{lines:,} lines in {report['seconds']:.1f} s ({report['tokens_per_second']:,.0f} tokens/s)")
    print(f"memory   {early / 2**20:.0f} MiB after a tenth, {late / 2**20:.0f} MiB at most")
    for label, seconds in (("reading", reading), ("writing", writing)):
        print(f"{label}  {seconds:.1f} s, {seconds / report['seconds']:.1%} of the run")


if __name__ == "__main__":
    main()
