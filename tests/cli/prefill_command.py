"""`moelora prefill` as tests call it: in this process or in one of its own, with an engine that needs no model."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moelora_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(Path(__file__).with_name("run_with_fake_engine.py"))]
SOURCES = [str(ROOT / "tests"), *(str(path) for path in ROOT.glob("packages/*/src"))]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
GOOD = '{"id": "a", "prompt_token_ids": [1, 2, 3]}\n{"id": "b", "prompt": "hello", "choices": [" world"]}\n'


class Outcome:
    """What one run of the command gave."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


class Command:
    """Runs `moelora prefill MODEL --input in.jsonl …` in this process, with the folder as working directory."""

    def __init__(self, model: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.model, self.folder, self._capfd = model, folder, capfd
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.input.write_text(GOOD)
        for adapter in ("adapter", "broken"):  # beside the folder, where no test looks at what was written
            (folder.parent / adapter).mkdir(exist_ok=True)

    def __call__(self, *arguments: Any, input_: Any = None, output: Any = None, model: Any = None) -> Outcome:
        files = ["--input", input_ or self.input, "--output", output or self.output]
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([*map(str, ["prefill", model or self.model, *files, *arguments])])
        stdout, stderr = self._capfd.readouterr()
        assert "Traceback" not in stderr
        return Outcome(int(caught.value.code or 0), stdout, stderr)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def files(self) -> set[str]:
        return {p.name for p in self.folder.iterdir()}


def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SCRIPT, *map(str, arguments)], capture_output=True, text=True, encoding="utf-8", timeout=60, **options
    )


def many_rows(command: Command, count: int) -> None:
    """Writes an input of `count` rows, long enough to be killed within."""
    command.input.write_text("".join(f'{{"prompt_token_ids": [{20 + i % 900}, 21, 22]}}\n' for i in range(count)))


def interrupted(command: Command, *arguments: Any) -> None:
    """Leaves one finished part, of 4,096 rows and as many lines, of 5,000: the engine breaks in the second."""
    many_rows(command, 5_000)
    engine = sys.modules["moelora.engine"].PrefillEngine
    score_one, calls = engine.score_one, itertools.count()

    def broken(self: Any, request: Any) -> Any:
        if next(calls) > 4_500:
            raise RuntimeError("broken")
        return score_one(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "score_one", broken)
        assert "\nkept 1 finished part in" in command(*arguments).stderr


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Ids of the processes that a run has started."""
    return [int(n) for n in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
