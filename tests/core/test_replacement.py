"""`modules_to_save` on modules that see tokens in other dimensions, or are given more than one tensor."""

import copy
import re

import pytest
import torch

from adapter_writers import PREFIX, write_adapter
from arch_world import logprobs, make, runnable
from moelora import AdapterError, EngineOptions, PrefillEngine, Request
from moelora.adapters.names import canonical
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from tiny_models import save_model

CASES = [
    ("hunyuan_v1_moe", "query_layernorm"),  # [1, heads, T, D]
    ("deepseek_v3", "kv_b_proj"),  # [1, 1, T, R]
    ("bailing_hybrid", "self_attn.o_norm"),  # gated, [1, T, heads, D]
    ("qwen3_next", "linear_attn.norm"),  # gated, [T·heads, D]
    ("deepseek_v4", "mlp.gate"),  # reads token ids besides
    ("hy_v3", "mlp.gate"),  # is given a bias besides
    ("deepseek_v4", "compressor.kv_norm"),  # needs some tokens to be called at all
]


@pytest.mark.parametrize(("architecture", "ending"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_replaced_modules_equal_changed_weights(tmp_path, architecture, ending):
    model_class, config = runnable(architecture)
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    model = model_class.from_pretrained(tmp_path / "model").eval().requires_grad_(False)
    targets = build_catalogue(open_base(tmp_path / "model").skeleton()).targets
    names = [name for name in targets if name.endswith(ending)]
    assert names
    models = {"__base__": model}
    for seed, adapter in enumerate(("one", "other")):
        generator = torch.Generator().manual_seed(seed)
        weights = {name: torch.randn(targets[name].shape, generator=generator) * 0.5 for name in names}
        stored = {f"{PREFIX}{name}.weight": weight for name, weight in weights.items()}
        write_adapter(tmp_path / adapter, stored, modules_to_save=[ending.rpartition(".")[2]], target_modules=[])
        changed = models[adapter] = copy.deepcopy(model)
        parameters = {canonical(name): parameter for name, parameter in changed.named_parameters()}
        for name, weight in weights.items():
            parameters[canonical(f"{name}.weight")].copy_(weight)
    engine = PrefillEngine(
        tmp_path / "model",
        adapters={name: tmp_path / name for name in ("one", "other")},
        options=EngineOptions(device="cpu"),
    )

    generator = torch.Generator().manual_seed(7)
    heads = config.num_attention_heads
    for lengths in ((2, 40, 9), (1, heads - 1), (heads,)):  # once as many tokens as heads
        requests = [
            Request(token_ids=torch.randint(3, 120, (length,), generator=generator).tolist(), adapter=adapter)
            for length, adapter in zip(lengths, ("one", "other", "__base__"), strict=False)
        ]
        for request, result in zip(requests, engine.score(requests), strict=True):
            expected = logprobs(models[request.adapter], request.token_ids)
            torch.testing.assert_close(torch.tensor(result.token_logprobs[1:]), expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_module_and_a_part_of_it_are_replaced_by_two_adapters(tmp_path):
    """The part then runs on the rows of one adapter alone."""
    model_class, config = runnable("inkling2")
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    models = {"__base__": model_class.from_pretrained(tmp_path / "model").eval().requires_grad_(False)}
    targets = build_catalogue(open_base(tmp_path / "model").skeleton()).targets
    for ending in ("embed_tokens", "embed_norm"):
        (name,) = [name for name in targets if name.endswith(ending)]
        weight = torch.randn(targets[name].shape)
        write_adapter(
            tmp_path / ending, {f"{PREFIX}{name}.weight": weight}, modules_to_save=[ending], target_modules=[]
        )
        changed = models[ending] = copy.deepcopy(models["__base__"])
        parameters = {canonical(one): parameter for one, parameter in changed.named_parameters()}
        parameters[canonical(f"{name}.weight")].copy_(weight)
    engine = PrefillEngine(
        tmp_path / "model",
        adapters={name: tmp_path / name for name in models if name != "__base__"},
        options=EngineOptions(device="cpu"),
    )
    generator = torch.Generator().manual_seed(7)
    requests = [
        Request(token_ids=torch.randint(3, 120, (length,), generator=generator).tolist(), adapter=adapter)
        for length, adapter in zip((9, 2, 14, 5), [*models, "embed_tokens"], strict=True)
    ]
    for request, result in zip(requests, engine.score(requests), strict=True):
        expected = logprobs(models[request.adapter], request.token_ids)
        torch.testing.assert_close(torch.tensor(result.token_logprobs[1:]), expected, atol=1e-4, rtol=0)


def test_a_head_whose_first_rows_are_as_many_as_its_input_is_wide(tmp_path):
    model = save_model(tmp_path / "model", "qwen3_moe")
    weight = torch.randn(model.lm_head.weight.shape) * 0.5
    write_adapter(tmp_path / "own", {f"{PREFIX}lm_head.weight": weight}, modules_to_save=["lm_head"], target_modules=[])
    engine = PrefillEngine(
        tmp_path / "model", adapters={"own": tmp_path / "own"}, options=EngineOptions(device="cpu", graph="off")
    )
    half = model.config.hidden_size // 2
    ids = torch.randint(3, 120, (half,)).tolist()
    base, own = engine.score([Request(token_ids=ids), Request(token_ids=ids, adapter="own")])
    torch.testing.assert_close(torch.tensor(base.token_logprobs[1:]), logprobs(model, ids), atol=1e-4, rtol=0)
    model.lm_head.weight.data = weight
    torch.testing.assert_close(torch.tensor(own.token_logprobs[1:]), logprobs(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "ending"),
    [
        ("muse_spark", "experts.post_expert_norm"),  # rows of one expert
        ("qwen4_exp", "indexer.k_layernorm"),  # a row for several tokens
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_see_no_rows_of_tokens_are_refused_at_load(tmp_path, architecture, ending):
    model_class, config = runnable(architecture)
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    targets = build_catalogue(open_base(tmp_path / "model").skeleton()).targets
    name = next(name for name in targets if name.endswith(ending))
    tensors = {f"{PREFIX}{name}.weight": torch.rand(targets[name].shape)}
    write_adapter(tmp_path / "one", tensors, r=2, target_modules=[], modules_to_save=[name])
    with pytest.raises(AdapterError, match=re.escape(f"{name} sees a tensor of shape")):
        PrefillEngine(tmp_path / "model", adapters={"one": tmp_path / "one"}, options=EngineOptions(device="cpu"))
    # One request at a time has nobody to be told apart from.
    options = EngineOptions(device="cpu", max_requests=1)
    engine = PrefillEngine(tmp_path / "model", adapters={"one": tmp_path / "one"}, options=options)
    ids = list(range(3, 43))
    (result,) = engine.score([Request(token_ids=ids, adapter="one")])
    model = model_class.from_pretrained(tmp_path / "model").eval()
    base = logprobs(model, ids)
    model.get_submodule(name).weight.data.copy_(tensors[f"{PREFIX}{name}.weight"])
    expected = logprobs(model, ids)
    torch.testing.assert_close(torch.tensor(result.token_logprobs[1:]), expected, atol=1e-4, rtol=0)
    assert (expected - base).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("architecture", "ending"), [("hy_v4", "lm_head"), ("hy_v4", "indexer.k_norm"), ("ernie4_5_moe", "mlp.gate")]
)
@pytest.mark.filterwarnings("ignore")
def test_what_takes_the_place_of_a_weight_kept_in_float32_is_in_float32(tmp_path, architecture, ending):
    model_class, config = runnable(architecture, torch.bfloat16)
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    targets = build_catalogue(open_base(tmp_path / "model").skeleton()).targets
    weights = {name: torch.randn(target.shape) * 0.5 for name, target in targets.items() if name.endswith(ending)}
    assert weights
    stored = {f"{PREFIX}{name}.weight": weight for name, weight in weights.items()}
    write_adapter(tmp_path / "saved", stored, modules_to_save=[ending.rpartition(".")[2]], target_modules=[])
    options = EngineOptions(device="cpu", dtype="bfloat16")
    ids = torch.randint(3, 120, (30,))
    engine = PrefillEngine(tmp_path / "model", adapters={"saved": tmp_path / "saved"}, options=options)
    for adapters in (("saved",), ("saved", "__base__")):
        results = engine.score([Request(token_ids=ids.tolist(), adapter=adapter) for adapter in adapters])
        assert [result.error for result in results] == [None] * len(adapters)
    for name, weight in weights.items():
        assert torch.equal(engine._bank.replacement(name, 0), weight)
    assert engine.report()["memory"]["bank"] == sum(weight.nbytes for weight in weights.values())
    if ending == "lm_head":
        changed = model_class.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
        changed.lm_head.weight.data = weights["lm_head"]
        with torch.inference_mode():
            hidden_TH = changed.model(input_ids=ids[None]).last_hidden_state[0]
            slot_T = torch.zeros(30, dtype=torch.int32)
            logits_TV = engine._head.logits(hidden_TH, slot_T, has_lora=True)
            torch.testing.assert_close(logits_TV, changed(input_ids=ids[None]).logits[0])
