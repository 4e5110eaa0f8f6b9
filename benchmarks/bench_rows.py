"""A million short rows through `moelora prefill`: does memory stay flat, and what do reading and writing cost?

`python benchmarks/bench_rows.py` runs a tiny model of random weights on whatever device there is, from JSON Lines to
JSON Lines and (`--format parquet`) from Parquet to Parquet. It watches the memory of the process (Linux), and asks the
process itself, some hundred times a second of wall and of processor time, what it is at: the shares are counts of
answers. `--rows` and `--shape` change the size of the input and of the model; `tiny` has that of `examples/tiny-moe`,
and `toy` is so small that little but the work on rows is left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

SHAPES = {
    "toy": {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8},
    "tiny": {"hidden_size": 128, "moe_intermediate_size": 160, "num_hidden_layers": 4, "num_experts": 8},
    "small": {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 32},
}
SECONDS_BETWEEN_SAMPLES = 0.007
LIMIT = 0.05
"""What reading and writing together may take of the time from the first row to the last line."""

READING = ("jobs/reader.py", "jobs/rows.py", "jobs/claims.py", "jobs/fingerprint.py", "jobs/parquet.py:ParquetReader")
WRITING = ("jobs/writer.py", "jobs/outputs.py", "jobs/parts.py", "cli/parts.py", "jobs/parquet.py:ParquetSink")
PLANNING = ("jobs/windows.py", "jobs/text.py", "moelora/checks.py", "batching/planner.py", "batching/sequences.py")
STAGES = {"reading": READING, "writing": WRITING, "planning": PLANNING}


def write_model(folder: Path, shape: str) -> None:
    """A config alone; weights are made at load."""
    from transformers import AutoConfig

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=1000, tie_word_embeddings=False, **sizes, **SHAPES[shape])
    config.save_pretrained(folder)


def write_rows(path: Path, count: int) -> None:
    """Prompts of 4 to 12 tokens with an id each, as Parquet if the name says so."""
    draw = random.Random(0)
    rows = ((f"row-{i}", draw.choices(range(1000), k=draw.randint(4, 12))) for i in range(count))
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        ids, prompts = map(list, zip(*rows, strict=True))
        parquet.write_table(pyarrow.table({"id": ids, "prompt_token_ids": prompts}), path)
        return
    with path.open("w") as file:
        file.writelines(f'{{"id": "{name}", "prompt_token_ids": {prompt}}}\n' for name, prompt in rows)


class Samples:
    """Counts what this process is at, by stage, whenever a timer has run out: one of wall, one of processor time."""

    def __init__(self) -> None:
        self.wall: Counter[str] = Counter()
        self.processor: Counter[str] = Counter()
        for timer, number, counts in (
            (signal.ITIMER_REAL, signal.SIGALRM, self.wall),
            (signal.ITIMER_PROF, signal.SIGPROF, self.processor),
        ):
            signal.signal(number, lambda _, frame, counts=counts: counts.update([stage_of(frame)]))
            signal.setitimer(timer, SECONDS_BETWEEN_SAMPLES, SECONDS_BETWEEN_SAMPLES)

    def stop(self) -> dict[str, dict[str, int]]:
        """The counts, and no more of them."""
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        return {"wall": dict(self.wall), "processor": dict(self.processor)}


def stage_of(frame: Any) -> str:
    """The stage of the innermost function of moelora; "loading" before the first row, "scoring" if it has no stage."""
    stage, running = "", False
    while frame is not None:
        code = frame.f_code
        if not stage and "/moelora" in code.co_filename:
            place = f"{code.co_filename}:{code.co_qualname}"
            found = (stage for stage, places in STAGES.items() if any(one in place for one in places))
            stage = next(found, "scoring")
        running = running or (code.co_name == "_run" and code.co_filename.endswith("prefill.py"))
        frame = frame.f_back
    return (stage or "scoring") if running else "loading"


def run_sampled(result: str, arguments: list[str]) -> None:
    """The command in this process, and its samples into the file `result`."""
    from moelora_cli.main import main as moelora

    samples = Samples()
    try:
        moelora(arguments)
    finally:
        Path(result).write_text(json.dumps(samples.stop()))


def resident(process: int) -> int:
    """Bytes of memory that a process holds; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def watch(command: list[str], parts: Path) -> list[tuple[int, int]]:
    """Runs the command; returns (parts finished, resident bytes) about twice a second."""
    seen, said = [], time.monotonic()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(0.5)
            finished = len(list(parts.glob("part-*"))) if parts.exists() else 0
            seen.append((finished, resident(process.pid)))
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(f"… {finished} parts, {seen[-1][1] / 2**20:.0f} MiB", flush=True)
    assert process.returncode == 0, f"exit {process.returncode}"
    return seen


def tell_memory(seen: list[tuple[int, int]]) -> None:
    """Resident memory when a tenth, half and all of the parts were there, and the most of all."""
    parts = max(count for count, _ in seen)
    held = [next((h for count, h in seen if count >= share * parts and h), 0) for share in (0.1, 0.5, 1.0)]
    at = ", ".join(f"{h / 2**20:.0f}" for h in held)
    print(f"memory   {at} MiB at 10, 50 and 100 %; {max(h for _, h in seen) / 2**20:.0f} at most", flush=True)


def tell_shares(samples: dict[str, dict[str, int]]) -> None:
    """Shares of what comes after loading."""
    for kind, counts in samples.items():
        total = sum(count for stage, count in counts.items() if stage != "loading")
        shares = {stage: counts.get(stage, 0) / total for stage in (*STAGES, "scoring")}
        both = shares["reading"] + shares["writing"]
        told = ", ".join(f"{stage} {share:.1%}" for stage, share in shares.items())
        print(f"{kind + ' time':<15}{told}; reading and writing {both:.1%} (at most {LIMIT:.0%})", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--sampled"]:
        return run_sampled(sys.argv[2], sys.argv[3:])
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--rows", type=int, default=1_000_000)
    parse.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parse.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parse.add_argument("--device", default="auto")
    args = parse.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", args.shape)
        rows, output = folder / f"rows.{args.format}", folder / f"out.{args.format}"
        write_rows(rows, args.rows)
        report_file, samples_file = folder / "report.json", folder / "samples.json"
        arguments = ["prefill", folder / "model", "--load-format", "dummy", "--input", rows, "--output", output]
        arguments += ["--report", report_file, "--device", args.device, "--quiet"]
        own = [sys.executable, __file__, "--sampled", samples_file]
        seen = watch([*map(str, own), *map(str, arguments)], output.with_name(output.name + ".parts"))
        report, samples = json.loads(report_file.read_text()), json.loads(samples_file.read_text())
    assert report["output_rows"] == args.rows
    assert report["error_rows"] == 0
    speed = f"{report['tokens_per_second']:,.0f} tokens/s"
    print(f"{args.format}: {report['output_rows']:,} rows in {report['seconds']:.1f} s ({speed})")
    tell_memory(seen)
    tell_shares(samples)


if __name__ == "__main__":
    main()
