"""`moelora inspect`: what it prints agrees with the files; what would be refused is shown, with exit code 2."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moelora_cli.main import main

CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_adapter(folder: Path, *, module: str = "self_attn.q_proj", **config: Any) -> Path:
    folder.mkdir(parents=True)
    full = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(full))
    tensors = {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, 32)
        tensors[f"{name}.lora_B.weight"] = torch.randn(32, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def inspect(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *map(str, arguments)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return int(caught.value.code or 0), said.out, said.err


def test_an_adapter_with_its_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    adapter = make_adapter(tmp_path / "a")
    code, out, _ = inspect(capsys, adapter, "--model", model, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["layouts"], facts["max_rank"], facts["tensors"]) == (["D"], 4, 6)
    assert facts["file_bytes"] == 6 * 4 * 32 * 4
    assert (facts["bytes_per_slot"], facts["slot_dtype"]) == (6 * 4 * 32 * 2, "bfloat16")
    assert [t["target"] for t in facts["targets"]] == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    assert all((t["ranks"], t["scales"], t["bytes"]) == ([4], [1.5], 512) for t in facts["targets"])
    assert facts["refused"] == []


def test_an_adapter_says_what_it_was_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    named = make_adapter(tmp_path / "named", base_model_name_or_path="org/base-30b", peft_version="0.18.0")
    facts = json.loads(inspect(capsys, named, "--json")[1])
    assert (facts["base_model"], facts["peft_version"]) == ("org/base-30b", "0.18.0")
    lines = [line.split() for line in inspect(capsys, named)[1].splitlines()]
    assert ["base_model", "org/base-30b"] in lines
    assert ["peft_version", "0.18.0"] in lines
    for number, given in enumerate(({}, {"base_model_name_or_path": None}, {"base_model_name_or_path": ""})):
        unnamed = make_adapter(tmp_path / str(number), **given)
        facts = json.loads(inspect(capsys, unnamed, "--json")[1])
        assert (facts["base_model"], facts["peft_version"]) == (None, None)
        assert "base_model" not in inspect(capsys, unnamed)[1]


def test_the_last_line_is_the_verdict(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good, bad = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", module="self_attn.z_proj")
    example = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
    for arguments, verdict in (
        ([good, "--model", model], "loads: yes"),
        ([good], "loads: yes, as far as its own files tell; --model checks the fit"),
        ([bad, "--model", model], "loads: no"),
        ([example], "loads: yes"),
        ([model], "loads: no"),  # its weights are missing
    ):
        code, out, _ = inspect(capsys, *arguments)
        assert (out.splitlines()[-1], code) == (verdict, 2 if verdict == "loads: no" else 0)
        assert json.loads(inspect(capsys, *arguments, "--json")[1])["loads"] is (code == 0)


def test_layers_that_are_alike_share_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = inspect(capsys, make_adapter(tmp_path / "a"))
    assert code == 0
    lines = [line.split() for line in out.splitlines() if "q_proj" in line]
    assert lines == ["model.layers.*.self_attn.q_proj D 4 1.5 3 × 512 bytes".split()]


@pytest.mark.parametrize(("patterned", "others"), [("0", "1-2"), ("1", "0,2")])
def test_layers_of_another_rank_are_named(
    patterned: str, others: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pattern = {"alpha_pattern": {f"layers.{patterned}.self_attn.q_proj": 12}}
    _, out, _ = inspect(capsys, make_adapter(tmp_path / "a", **pattern))
    lines = sorted(" ".join(line.split()) for line in out.splitlines() if "q_proj" in line)
    assert lines == sorted(
        [
            f"model.layers.{patterned}.self_attn.q_proj D 4 3 512 bytes",
            f"model.layers.{others}.self_attn.q_proj D 4 1.5 2 × 512 bytes",
        ]
    )


def test_what_would_be_refused_is_shown(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = inspect(capsys, make_adapter(tmp_path / "a", module="self_attn.z_proj"), "--model", model)
    assert code == 2
    assert "refused: 0 of 6 adapter tensors used" in out
    code, out, _ = inspect(capsys, make_adapter(tmp_path / "b", use_dora=True))
    assert code == 2
    assert "refused: adapter_config.json: use_dora" in out
    (tmp_path / "a" / "adapter_config.json").unlink()
    assert "refused: adapter_config.json not found" in inspect(capsys, tmp_path / "a")[1]


def test_refusals_that_differ_in_their_numbers_alone_share_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = make_adapter(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    for layer, expert in [*itertools.product((0, 1, 3), range(5)), (4, 2)]:
        name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.up_proj"
        tensors |= {f"{name}.lora_A.weight": torch.ones(5, 32), f"{name}.lora_B.weight": torch.ones(16, 5)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]})
    )
    code, out, _ = inspect(capsys, folder)
    assert code == 2
    assert sorted(line for line in out.splitlines() if line.startswith("refused")) == [
        "refused: model.layers.0-1,3.mlp.experts.0-4.up_proj: its tensors have rank 5, adapter_config.json says 8",
        "refused: model.layers.0-2.self_attn.q_proj: its tensors have rank 4, adapter_config.json says 8",
        "refused: model.layers.4.mlp.experts.2.up_proj: its tensors have rank 5, adapter_config.json says 8",
    ]
    assert len(json.loads(inspect(capsys, folder, "--json")[1])["refused"]) == 3 + 3 * 5 + 1


def test_what_is_not_known_is_left_out(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = make_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    _, out, _ = inspect(capsys, folder)
    keys = [line.split()[0] for line in out.splitlines()]
    assert keys == ["adapter", "slot_dtype", "refused:", "loads:"]
    facts = json.loads(inspect(capsys, folder, "--json")[1])
    unknown = ("layouts", "max_rank", "bytes_per_slot", "tensors", "file_bytes", "file_dtypes")
    assert [facts[key] for key in unknown] == [None] * 6


@pytest.mark.parametrize("columns", [80, 60])
def test_no_line_is_wider_than_the_terminal(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    for name in ("glossary", "scripture"):
        _, out, _ = inspect(capsys, f"examples/tiny-moe/adapters/{name}", "--model", "examples/tiny-moe")
        assert max(map(len, out.splitlines())) <= columns
        listed = out.split("targets (")[1]
        assert len(re.findall(r"  (?:D|E|W|W2|P)  +8  +[\d.]+  +(?:\d × )?[\d.]+ KiB$", listed, re.M)) == len(
            re.findall("KiB$", listed, re.M)
        )
    _, out, _ = inspect(capsys, "examples/tiny-moe")
    assert max(map(len, out.splitlines())) <= columns
    assert re.search(r"17 linear\s+layers,\s+17\s+norms,\s+8 expert\s+parameters", out)


def test_a_checkpoint(model: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = inspect(capsys, model, "--json")
    facts = json.loads(out)
    assert code == 2  # its weights are missing
    assert "model.safetensors" in facts["refused"][0]
    assert (facts["model_type"], facts["layers"], facts["experts"]) == ("qwen3_moe", 3, 4)
    assert (facts["packs_requests"], facts["tokenizer"], facts["dtype"]) == (True, False, "bfloat16")
    assert facts["adaptable"]["experts"] == 6
    assert facts["adaptable"]["router"] == 3
    _, out, _ = inspect(capsys, model)
    assert "1 embedding, 13 linear layers, 13 norms, 6 expert parameters, 3 routers" in out


def test_what_is_neither_is_an_error(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    near = tmp_path / "modell"
    for path, hint in ((near, f"; did you mean '{model}'?"), (tmp_path / "none", ""), (tmp_path / "no" / "model", "")):
        code, out, said = inspect(capsys, path)
        assert (code, out) == (2, "")
        assert said == (
            f"error: {path}: neither the folder of an adapter or a model, nor a model in the Hugging Face cache, where "
            f"`hf download NAME` puts one{hint}\n"
        )
    (tmp_path / "runs").mkdir()
    neither = "runs: holds neither a config.json, as a model, nor an adapter_config.json, as an adapter"
    for hint in ("", "; subfolders that have one: checkpoint-5"):
        code, out, said = inspect(capsys, tmp_path / "runs")
        assert (code, out, said) == (2, "", f"error: {tmp_path}/{neither}{hint}\n")
        make_adapter(tmp_path / "runs" / "checkpoint-5") if not hint else None
    (tmp_path / "file").write_text("x")
    assert "is a file" in inspect(capsys, tmp_path / "file")[2]
    code, _, said = inspect(capsys, model, "--model", model)
    assert code == 2
    assert "--model is for adapters" in said
    (model / "config.json").write_text("{")
    assert "not valid JSON" in inspect(capsys, model)[2]


def test_an_adapter_that_is_not_there_is_said_to_be_missing(tmp_path, model, capsys):
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(tmp_path / "pyton"), "--model", str(model)])
    assert end.value.code == 2
    assert f"{tmp_path / 'pyton'}: no such folder\n" in capsys.readouterr().err
    (tmp_path / "python").mkdir()
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "pyton"), "--model", str(model)])
    assert f"no such folder; did you mean '{tmp_path / 'python'}'?\n" in capsys.readouterr().err


def test_an_adapter_of_zeros_is_noted(tmp_path, capsys):
    folder, note = make_adapter(tmp_path / "fresh"), "every B is zero, as before training: this adapter changes nothing"

    def notes():
        with pytest.raises(SystemExit) as end:
            main(["inspect", str(folder), "--json"])
        assert end.value.code == 0
        return json.loads(capsys.readouterr().out)["notes"]

    assert note not in notes()
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({k: t * ("lora_A" in k) for k, t in tensors.items()}, folder / "adapter_model.safetensors")
    assert note in notes()
