"""The command as a whole: what it imports, its public options, `env`."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moelora_cli.main import cli, main

PATH = ["packages/core/src", "packages/kernels/src", "packages/cli/src"]
ROOT = Path(__file__).resolve().parents[2]

OPTIONS = {
    "prefill": {
        "model",
        "--adapters",
        "--input",
        "--output",
        "--default-adapter",
        "--with-base",
        "--logprobs",
        "--top-k",
        "--max-length",
        "--on-long",
        "--backend",
        "--graph",
        "--device",
        "--dtype",
        "--max-tokens",
        "--max-requests",
        "--slots",
        "--buckets",
        "--load-format",
        "--attention",
        "--batch-invariant",
        "--lora-b-layout",
        "--seed",
        "--devices",
        "--worker",
        "--shard",
        "--overwrite",
        "--report",
        "--metrics-file",
        "--dry-run",
        "--quiet",
        "--debug",
    },
    "plan": {
        "model",
        "--adapters",
        "--input",
        "--default-adapter",
        "--with-base",
        "--logprobs",
        "--top-k",
        "--max-length",
        "--on-long",
        "--backend",
        "--graph",
        "--device",
        "--dtype",
        "--max-tokens",
        "--max-requests",
        "--slots",
        "--buckets",
        "--load-format",
        "--attention",
        "--batch-invariant",
        "--lora-b-layout",
        "--seed",
        "--json",
        "--quiet",
        "--debug",
        "--devices",
        "--shard",
    },
    "verify": {
        "model",
        "--adapters",
        "--input",
        "--sample",
        "--tolerance",
        "--default-adapter",
        "--with-base",
        "--max-length",
        "--on-long",
        "--backend",
        "--graph",
        "--device",
        "--dtype",
        "--max-tokens",
        "--max-requests",
        "--slots",
        "--buckets",
        "--load-format",
        "--attention",
        "--batch-invariant",
        "--lora-b-layout",
        "--seed",
        "--json",
        "--quiet",
        "--debug",
    },
    "bench": {
        "model",
        "--workload",
        "--task",
        "--adapters",
        "--rank",
        "--backend",
        "--graph",
        "--peer",
        "--without-base",
        "--repeat",
        "--attention",
        "--batch-invariant",
        "--max-tokens",
        "--buckets",
        "--layers",
        "--scale",
        "--quick",
        "--no-profile",
        "--load-format",
        "--device",
        "--dtype",
        "--seed",
        "--json",
        "--plot",
        "--quiet",
        "--debug",
    },
    "tune": {"model", "--tokens", "--dtype", "--device", "--output", "--quiet", "--debug"},
    "inspect": {"path", "--model", "--lora-b-layout", "--json", "--debug"},
    "merge": {"folder", "--output", "--overwrite", "--debug"},
    "env": {"--json", "--debug"},
}
"""The public options of each command. A change here is a decision that users will notice."""


def test_the_public_options_are_these():
    found = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in cli.commands.items()
    }
    assert found == OPTIONS


def in_a_fresh_process(code: str) -> str:
    script = f"import sys; sys.path[:0] = {[str(ROOT / p) for p in PATH]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["prefill", "--help"], ["plan", "--help"], ["verify", "--help"], ["inspect", "--help"], ["--version"]],
)
def test_help_imports_nothing_heavy(arguments: list[str]):
    code = f"""
from moelora_cli.main import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert stop.code == 0, stop.code
heavy = ("torch", "transformers", "triton", "numpy", "huggingface_hub", "tokenizers", "rich", "prometheus_client")
print([name for name in heavy if name in sys.modules])
"""
    assert in_a_fresh_process(code).splitlines()[-1] == "[]"


def test_help_returns_in_half_a_second():
    in_a_fresh_process("import moelora_cli.main")  # compiled once
    best = float("inf")
    for _ in range(5):  # the fastest of some, since other processes share the machine
        start = time.monotonic()
        in_a_fresh_process("from moelora_cli.main import main; main(['--help'])")
        best = min(best, time.monotonic() - start)
    assert best < 0.5


def test_env_says_what_is_here(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["env", "--json"])
    assert caught.value.code == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"versions", "machine", "devices", "backends", "kernels"}
    assert facts["versions"]["torch"]
    assert "torch" in facts["backends"]


def test_env_is_no_wider_than_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def told(columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit):
            main(["env"])
        return capsys.readouterr().out.splitlines()

    narrow, wide = told(80), told(1000)
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    assert " ".join(narrow).split() == " ".join(wide).split()


def test_env_works_without_any_of_the_packages():
    code = """
for name in ("torch", "transformers", "triton", "moelora_kernels", "tokenizers", "safetensors"):
    sys.modules[name] = None
from moelora_cli.main import main
try:
    main(["env"])
except SystemExit as stop:
    print("code", stop.code)
"""
    said = in_a_fresh_process(code)
    assert said.splitlines()[-1] == "code 0"
    assert "unavailable" in said
