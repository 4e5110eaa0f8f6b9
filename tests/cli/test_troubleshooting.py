"""Mistakes as people make them: what the program says then is found on the troubleshooting page."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moelora_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-moe"
PYTHON = MODEL / "adapters" / "python"
GOOD = '{"prompt": "def main():"}\n'


def listed() -> list[re.Pattern[str]]:
    """The page's messages as patterns; those of one word are left out, which everything would match."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts = [one or other for one, other in re.findall(r"^(?:`` (.+) ``|`([^`]+)`)$", page, re.M)]
    telling = [text for text in texts if len(re.findall(r"[a-zA-Z]{2,}", text)) >= 2]
    return [re.compile(".*".join(map(re.escape, text.split("…"))), re.S) for text in telling]


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    return line.removeprefix("error: ")


def adapter(folder: Path, change: Callable[[dict], object]) -> Path:
    """A copy of an adapter whose config `change` has changed."""
    shutil.copytree(PYTHON, folder / "adapter")
    path = folder / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder / "adapter"


MISTAKES = {
    "a name for the backend that is nearly right": lambda p: ["--backend", "tritn"],
    "no such device": lambda p: ["--device", "gpu"],
    "a GPU that is not there": lambda p: ["--device", "cuda:93"],
    "buckets that do not ascend": lambda p: ["--buckets", "64,16"],
    "a shard beyond the last": lambda p: ["--shard", "4/4"],
    "a default adapter that is not given": lambda p: ["--default-adapter", "pyton", "--adapters", PYTHON],
    "an adapter that is not there": lambda p: ["--adapters", p / "nowhere"],
    "a folder without adapters": lambda p: ["--adapters", p],
    "one name twice": lambda p: ["--adapters", PYTHON, "--adapters", f"python={MODEL / 'adapters' / 'spanish'}"],
    "DoRA": lambda p: ["--adapters", adapter(p, lambda c: c.update(use_dora=True))],
    "a field of tomorrow": lambda p: ["--adapters", adapter(p, lambda c: c.update(mirror_factors=3))],
    "no alpha": lambda p: ["--adapters", adapter(p, lambda c: c.pop("lora_alpha"))],
    "another rank": lambda p: ["--adapters", adapter(p, lambda c: c.update(r=4))],
    "a report on top of the input": lambda p: ["--report", p / "rows.jsonl"],
    "batch invariance on the CPU": lambda p: ["--batch-invariant", "--device", "cpu"],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_said_of_a_mistake_is_on_the_page(mistake, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(GOOD)
    options = MISTAKES[mistake](tmp_path)
    arguments = ["prefill", MODEL, "--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out", *options]
    message = said(capsys, *arguments)
    assert any(pattern.search(message) for pattern in listed()), message


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[1]",
        '{"promt": "x"}',
        '{"prompt": "x", "prompt_token_ids": [1]}',
        '{"prompt": "x", "choices": []}',
        '{"prompt": "x", "choices": ["a", ""]}',
        '{"prompt_token_ids": [1, true]}',
        '{"prompt_token_ids": [999999]}',
        '{"prompt": "x", "adapter": "nobody"}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"prompt": ""}',
        '{"id": 1, "id": 2, "prompt": "x"}',
    ],
)
def test_what_is_said_of_a_bad_row_is_on_the_page(row, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["prefill", str(MODEL), "--input", str(tmp_path / "rows.jsonl"), "--dry-run", "--quiet"])
    assert ended.value.code == 3
    message = json.loads(capsys.readouterr().out)["error"].removeprefix("line 1: ")
    assert any(pattern.search(message) for pattern in listed()), message
