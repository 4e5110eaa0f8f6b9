"""The script that made `examples/tiny-moe` runs: a few steps, on texts made up here in place of the Debian packages."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    """The script as a module; what it sets for the whole process is set back."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import make_tiny_moe

    threads = torch.get_num_threads()
    yield make_tiny_moe
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def made_up(make_tiny_moe, name: str):
    """Documents of random words, with a vocabulary of their own for each source."""
    words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 9))) for _ in range(900)]
    documents = [f"{name}. " + " ".join(random.choices(words, k=400)) for _ in range(60)]
    return make_tiny_moe.Split(train=documents[:45], heldout=documents[45:])


@pytest.mark.slow
def test_the_recipe_runs_from_texts_to_the_matrix(recipe, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(recipe, "load", lambda source: made_up(recipe, source.name))
    monkeypatch.setattr(recipe, "ROWS_PER_KIND", 2)
    monkeypatch.setattr(recipe, "CHOICES_PER_KIND", 1)
    arguments = ["--output", str(tmp_path), "--threads", "1", "--scale", "0.003"]
    monkeypatch.setattr(sys, "argv", ["make_tiny_moe.py", *arguments])
    recipe.main()
    said = capsys.readouterr().out
    assert said.count("logits differ by at most") == 4
    assert "choices right, each under its own kind's adapter" in said
    assert len((tmp_path / "heldout.jsonl").read_text().splitlines()) == 8
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert {path.parent.name for path in tmp_path.glob("adapters/*/adapter_model.safetensors")} == {
        *("python", "scripture", "spanish", "glossary")
    }
