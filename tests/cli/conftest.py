"""Fixtures of the command's tests: a model folder without weights, the engine that stands in, and the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_engine
from cli.prefill_command import Command
from core.tiny_tokenizers import byte_level, save


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(byte_level(bos="<s>", adds_bos=True), tmp_path_factory.mktemp("model") / "m")
    config = {"model_type": "qwen3_moe", "vocab_size": fake_engine.VOCAB_SIZE, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def no_real_engine() -> Iterator[None]:
    real = sys.modules.pop("moelora.engine", None)
    fake_engine.install()
    yield
    sys.modules.pop("moelora.engine", None)
    if real is not None:
        sys.modules["moelora.engine"] = real


@pytest.fixture
def command(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return Command(model, tmp_path, capfd)
