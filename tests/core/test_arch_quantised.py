"""Quantised checkpoints, written here: they run like the weights that they stand for, with adapters on top."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from arch_world import adapt_everything, logprobs, merged
from moelora import CheckpointError, EngineOptions, PrefillEngine, Request
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from tiny_models import VOCAB, save_model

BLOCK = 16
PROMPTS = [list(range(3, 3 + n)) for n in (2, 30, 9)]


def quantise(weight, block=BLOCK):
    """8-bit floats and one scale per block, the last block of a side perhaps smaller; and what they stand for."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block), -(-columns // block))
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            piece = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[piece].abs().max() / 448
            stored[piece] = (weight[piece] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[piece] = stored[piece].float() * scales[i, j]
    return stored, scales, meant


def write_fp8(folder, model_type, **changes):
    """Rewrites a saved model: every projection in blocks. Returns transformers' model with the weights meant."""
    model = save_model(folder, model_type, seed=4, **changes)
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name, weight in list(tensors.items()):
        if "_proj" in name and weight.ndim == 2:
            stored, scales, plain[name] = quantise(weight)
            tensors[name], tensors[f"{name}_scale_inv"] = stored, scales
    truth = folder.parent / "truth"
    truth.mkdir()
    save_file(plain, truth / "model.safetensors", metadata={"format": "pt"})
    (truth / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(folder, quant_method="fp8", weight_block_size=[BLOCK, BLOCK], activation_scheme="dynamic")
    return type(model).from_pretrained(truth).eval()


def set_quantisation(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def check(folder, model):
    """Base and an adapter on everything, against `model` and its weights with the deltas."""
    catalogue = build_catalogue(open_base(folder).skeleton())
    writer = adapt_everything(catalogue, folder.parent / "tuned", seed=6)
    tuned = merged(model, catalogue, writer)
    events = []
    engine = PrefillEngine(
        folder,
        adapters={"tuned": folder.parent / "tuned"},
        options=EngineOptions(device="cpu"),
        on_event=events.append,
    )
    for name, truth in (("__base__", model), ("tuned", tuned)):
        results = engine.score([Request(token_ids=ids, adapter=name) for ids in PROMPTS])
        for ids, result in zip(PROMPTS, results, strict=True):
            difference = torch.tensor(result.token_logprobs[1:]) - logprobs(truth, ids)
            assert difference.abs().max() < 1e-4
    return engine, events


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "mixtral", "qwen3"])
@pytest.mark.filterwarnings("ignore")
def test_blocks_of_fp8(tmp_path, model_type):
    """Widths of 24 and 40 leave smaller blocks at the ends, as in the latent projections of DeepSeek."""
    model = write_fp8(tmp_path / "model", model_type)
    engine, events = check(tmp_path / "model", model)
    assert "fp8 weights are dequantised at load and held in" in engine.report()["quantised"]
    assert engine.report()["quantised"] in events


@pytest.mark.filterwarnings("ignore")
def test_fp8_without_a_scale_is_refused(tmp_path):
    write_fp8(tmp_path / "model", "qwen3_moe")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is F8_E4M3 and has no scale"):
        PrefillEngine(tmp_path / "model", options=EngineOptions(device="cpu"))


VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def pack_mxfp4(weight):
    """`[E, in, out]` as bytes of two 4-bit floats, `[E, out, in/32, 16]`, and exponents; and what they stand for."""
    rows = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(rows.abs().amax(dim=-1) / 6.0)).clamp(-100, 100)
    scaled = rows / 2.0 ** exponents.unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - VALUES).abs().argmin(dim=-1).to(torch.uint8)
    meant = (VALUES[codes.long()] * 2.0 ** exponents.unsqueeze(-1)).flatten(-2).transpose(1, 2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8), meant.contiguous()


@pytest.mark.filterwarnings("ignore")
def test_mxfp4_of_gpt_oss(tmp_path):
    folder = tmp_path / "model"
    model = save_model(folder, "gpt_oss", seed=4, intermediate_size=32)
    tensors = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, meant = pack_mxfp4(tensors.pop(name))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        state[name].copy_(meant)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(folder, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    engine, _ = check(folder, model)
    assert "mxfp4" in engine.report()["quantised"]


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "made_up"])
def test_other_methods_are_refused_by_name(tmp_path, method):
    save_model(tmp_path, "qwen3_moe")
    set_quantisation(tmp_path, quant_method=method, bits=4)
    with pytest.raises(CheckpointError, match=f"quantised by '{method}'.*fp8, mxfp4"):
        PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))


def test_plain_checkpoints_say_nothing_of_it(tmp_path):
    save_model(tmp_path, "qwen3_moe")
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    assert engine.report()["quantised"] is None
    assert engine.vocab_size == VOCAB
