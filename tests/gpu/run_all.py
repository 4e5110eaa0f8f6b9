"""All that needs a GPU, in one command: tests side by side, large ones alone, the memory checker, then the benchmarks.

    python tests/gpu/run_all.py OUT [--parts tests,large,memcheck,benchmarks,cases] [--jobs 5]

Each part has a time limit, and its log goes to OUT. What was found belongs into `docs/performance.md`. The reference
cases run if `--cases SCRIPT` names a checker that takes `--command`, `--device` and `--backend`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-v",  # so that a run that is cut short has named its failures
    "-rsP",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "tests/gpu",
    "--timeout",
]
BENCHMARKS = ("experts", "lora_gemm", "dense_lora", "attention", "adapter_load", "many_adapters")


@dataclass(frozen=True, slots=True)
class Step:
    """One command with its limit in seconds. tail: how many lines of its log are shown."""

    name: str
    command: list[str]
    limit: int
    tail: int


def steps(options: argparse.Namespace) -> list[Step]:
    """The steps of the parts asked for, in order."""
    memcheck = [sys.executable, "tests/gpu/memcheck.py"]
    checked = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1", *memcheck]
    parts: dict[str, list[Step]] = {
        "tests": [Step("tests", [*PYTEST, "-m", "gpu and not large", "-n", str(options.jobs)], 300, 40)],
        "large": [Step("large", [*PYTEST, "-m", "gpu and large"], 300, 30)],
        "memcheck": [Step("compile", memcheck, 90, 1), Step("memcheck", checked, 120, 3)],
        "benchmarks": [Step(name, [sys.executable, f"benchmarks/bench_{name}.py"], 90, 30) for name in BENCHMARKS],
        "cases": [
            Step(
                f"cases-{backend}",
                [sys.executable, options.cases, "--command", f"{sys.executable} -m moelora_cli", "--device", "cuda",
                 "--backend", backend],
                200,
                3,
            )
            for backend in ("triton", "csgmv")
            if options.cases
        ],
    }  # fmt: skip
    return [step for part in options.parts.split(",") for step in parts[part]]


def run(step: Step, out: Path, environment: dict[str, str]) -> bool:
    """Runs one step and shows the end of its log. True if it succeeded in time."""
    log = out / f"{step.name}.txt"
    began = time.monotonic()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                step.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=step.limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    print(f"== {step.name}: {'ok' if code == 0 else f'exit {code}'}, {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(line[:200] for line in log.read_text(errors="replace").splitlines()[-step.tail :]), flush=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="tests,large,memcheck,benchmarks")
    parser.add_argument("--jobs", type=int, default=5, help="test processes side by side")
    parser.add_argument("--cases", help="script that checks the reference cases")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sources = [str(ROOT / "packages" / name / "src") for name in ("core", "kernels", "cli")]
    path = os.pathsep.join([*sources, str(ROOT / "tests"), str(ROOT / "benchmarks")])
    done = [run(step, options.out, {**os.environ, "PYTHONPATH": path}) for step in steps(options)]
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
