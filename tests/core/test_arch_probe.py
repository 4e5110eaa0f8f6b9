"""The probe: decides by trying alone, for every architecture and for ones that try to deceive it."""

import copy
import json
import time

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

import moelora.models.verdicts
from arch_world import (
    ARCHITECTURES,
    RUNS_ALL,
    has_masks_by_request,
    has_registered_experts,
    make,
    runnable,
    tiny,
)
from moelora import EngineOptions, PrefillEngine, Request
from moelora.models.architecture import Architecture
from moelora.models.attention import BIASED, EAGER, MASKED, PACKED
from moelora.models.decoder import decoder_of
from moelora.models.mixers import Loop
from moelora.models.probe import probe, small_copy
from moelora.models.small_config import kinds_of
from moelora.models.verdicts import cache_folder, find_verdict
from moelora.types import GraphMode
from tiny_models import reference_logprobs, save_model, tiny_config

# What was found by hand for each, apart from the probe: the rest mix requests somewhere.
PLAIN = set(
    """
    afmoe aria axk1 beam cohere2_moe dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 dots1 ernie4_5_moe ernie4_5_vl_moe
    exaone_moe flex_olmo flint gemma4 glm4_moe glm4_moe_lite glm4v_moe gpt_oss granitemoe granitemoe_swa
    granitemoeshared hunyuan_v1_moe hy_v3 jetmoe kolibri1 laguna longcat_flash mellum mimo_v2_flash minimax_m2 mistral4
    mixtral muse_spark olmoe phimoe qwen2_moe qwen3_moe qwen3_omni_moe qwen3_vl_moe solar_open step3p7 unlimited_ocr
    hunyuan_v1_moe+alpha mixtral+yarn gemma4+kvshare granitemoehybrid+attn nemotron_h+nolatent deepseek_v4-compress
    minimax_m3_vl+full
    """.split()
)
MASK_ALONE = {
    "axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "mistral_large4", "qwen2_moe+window", "phimoe+window",
}  # fmt: skip


def unheard_of(name):
    """The decoder of a tiny model on the meta device, under names that nothing can know."""
    model_class, config = tiny(name)
    with torch.device("meta"):
        decoder = decoder_of(model_class(config))
    decoder.__class__ = type("UnheardOfModel", (type(decoder),), {})
    decoder.config.model_type = "unheard_of"
    return decoder


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.filterwarnings("ignore")
def test_names_play_no_part(name):
    model_class, config = runnable(name)
    verdict = probe(unheard_of(name))
    if not has_masks_by_request(config):
        assert not verdict.packs
        return
    assert verdict.packs, verdict.reason
    assert verdict.experts
    plain = verdict.attention == PACKED and not verdict.loops
    if RUNS_ALL:
        assert plain == (name in PLAIN)
    if name in MASK_ALONE:
        assert (verdict.attention, verdict.loops) == (MASKED, ())
    if name in PLAIN and plain and has_registered_experts(model_class):
        assert verdict.graph_modes == (GraphMode.FULL, GraphMode.BREAKABLE)


class Deceiver(modeling_qwen3_moe.Qwen3MoeModel):
    """Looks like an architecture that packs."""


def deceive(monkeypatch, target, attribute, replacement):
    monkeypatch.setattr(target, attribute, replacement)
    config = tiny_config("qwen3_moe")
    with torch.device("meta"):
        return probe(Deceiver(config))


def test_a_norm_that_looks_at_the_token_before(monkeypatch):
    original = modeling_qwen3_moe.Qwen3MoeRMSNorm.forward

    def leak(self, x):
        return original(self, x + 0.1 * x.roll(1, dims=1) if x.ndim == 3 else x)

    verdict = deceive(monkeypatch, modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", leak)
    assert not verdict.packs or "Qwen3MoeRMSNorm" in verdict.looped


def test_a_router_that_balances_over_the_row(monkeypatch):
    original = modeling_qwen3_moe.Qwen3MoeTopKRouter.forward

    def balance(self, x):
        return original(self, x - x.mean(dim=0, keepdim=True))

    verdict = deceive(monkeypatch, modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", balance)
    assert not verdict.packs or verdict.loops


def test_attention_that_goes_past_the_registry(monkeypatch):
    interface = type(modeling_qwen3_moe.ALL_ATTENTION_FUNCTIONS)
    own = modeling_qwen3_moe.eager_attention_forward

    def past(self, name, default=None):
        def attend(module, query, key, value, mask, scaling, dropout=0.0, **others):
            causal = torch.full((query.shape[2], query.shape[2]), float("-inf")).triu(1)
            return own(module, query, key, value, causal, scaling, dropout)

        return attend

    verdict = deceive(monkeypatch, interface, "get_interface", past)
    assert not verdict.packs or "Qwen3MoeAttention" in verdict.looped


def test_positions_counted_by_the_row(monkeypatch):
    original = modeling_qwen3_moe.Qwen3MoeModel.forward

    def by_row(self, input_ids, position_ids=None, **others):
        return original(self, input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **others)

    # Rotary embeddings only see differences, so that the row's own count does no harm; a leak of the body does.
    assert deceive(monkeypatch, Deceiver, "forward", by_row).packs

    def centred(self, input_ids, **others):
        out = original(self, input_ids=input_ids, **others)
        out.last_hidden_state = out.last_hidden_state - out.last_hidden_state.mean(dim=1, keepdim=True)
        return out

    verdict = deceive(monkeypatch, Deceiver, "forward", centred)
    assert not verdict.packs
    assert verdict.graph_modes == ()
    assert "change each other" in verdict.reason


def test_positions_that_are_counted_in_steps_of_two(monkeypatch):
    original = modeling_qwen3_moe.Qwen3MoeModel.forward

    def own_count(self, input_ids, position_ids=None, **others):
        twice = 2 * torch.arange(input_ids.shape[1])[None]
        return original(
            self, input_ids=input_ids, position_ids=twice if position_ids is None else position_ids, **others
        )

    verdict = deceive(monkeypatch, Deceiver, "forward", own_count)
    assert not verdict.packs
    assert "positions" in verdict.reason


def test_a_model_whose_positions_begin_elsewhere(tmp_path):
    """Positions of its kind begin behind the padding token, and the padding token itself has that token's own."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("roberta", is_decoder=True, vocab_size=128, max_position_embeddings=200, **sizes)
    ).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    pad = model.config.pad_token_id
    prompts = [[5, 6, 7, 8], [9, pad, 10, 11, 12], list(range(20, 70))]
    results = PrefillEngine(tmp_path, options=EngineOptions(device="cpu")).score(
        [Request(token_ids=p) for p in prompts]
    )
    for prompt, result in zip(prompts, results, strict=True):
        expected = reference_logprobs(model, prompt)
        torch.testing.assert_close(torch.tensor(result.token_logprobs[1:]), expected, atol=1e-4, rtol=0)


def test_experts_that_are_not_what_they_say(monkeypatch):
    def halved(self, rows):
        gate, up = rows.chunk(2, dim=-1)
        return self.act_fn(gate) * up * 0.5

    # What the module tells of itself is not what its own forward does: then that runs.
    verdict = deceive(monkeypatch, modeling_qwen3_moe.Qwen3MoeExperts, "_apply_gate", halved)
    assert verdict.packs
    assert not verdict.experts


def test_an_unknown_argument_of_attention_leaves_it_to_the_model(monkeypatch):
    original = modeling_qwen3_moe.Qwen3MoeAttention.forward

    def with_more(self, *args, **kwargs):
        return original(self, *args, **kwargs, temperature_of_heads=torch.ones(1))

    verdict = deceive(monkeypatch, modeling_qwen3_moe.Qwen3MoeAttention, "forward", with_more)
    assert (verdict.packs, verdict.attention) == (False, EAGER)
    assert "temperature_of_heads" in verdict.reason


def test_what_cannot_be_made_small_runs_alone():
    class Stubborn(modeling_qwen3_moe.Qwen3MoeModel):
        def __init__(self, config):
            if config.vocab_size < 10_000:
                raise ValueError("not with so few words")
            super().__init__(config)

    with torch.device("meta"):
        verdict = probe(Stubborn(tiny_config("qwen3_moe", vocab_size=20_000)))
    assert (verdict.packs, verdict.attention, verdict.experts) == (False, EAGER, False)
    assert "not with so few words" in verdict.reason


@pytest.mark.parametrize(
    "verdict",
    [
        Architecture(model_type="x", packs=False, attention=PACKED, experts=True, reason="a test says so"),
        Architecture(model_type="x", packs=False, attention=EAGER, experts=False, reason="a test says so"),
        Architecture(model_type="x", packs=True, attention=BIASED, experts=True),
        Architecture(
            model_type="x",
            packs=True,
            attention=MASKED,
            experts=True,
            loops=(
                Loop(
                    name="Qwen3MoeMLP",
                    inputs={"[0][0]": (1,)},
                    outputs={"": (1,)},
                ),
            ),
        ),
    ],
)
def test_the_engine_obeys(tmp_path, monkeypatch, verdict):
    """Whatever the verdict says, the numbers are those of transformers: it decides how, not what."""
    model = save_model(tmp_path, "qwen3_moe", seed=2, mlp_only_layers=[0])
    monkeypatch.setattr("moelora.models.base_model.find_verdict", lambda *given: verdict)
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    prompts = [[5, 9, 11, 3], list(range(3, 40)), [7]]
    for ids, result in zip(prompts, engine.score([Request(token_ids=ids) for ids in prompts]), strict=True):
        if len(ids) > 1:
            torch.testing.assert_close(
                torch.tensor(result.token_logprobs[1:]), reference_logprobs(model, ids), atol=1e-4, rtol=0
            )
    report = engine.report()
    assert sum(passes["count"] for passes in report["passes"]) == (1 if verdict.packs else len(prompts))
    assert report["packing_reason"] == verdict.reason


QWEN = {"num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936, "num_experts_per_tok": 8}
PUBLISHED = {
    "qwen3_moe": {**QWEN, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768},
    "qwen3_5_moe_text": {**QWEN, "num_hidden_layers": 40, "num_attention_heads": 16, "head_dim": 256},
    "gpt_oss": {"num_hidden_layers": 24, "num_local_experts": 32},
    "deepseek_v3": {},
    "mixtral": {},
    "llama4_text": {"num_hidden_layers": 48, "num_local_experts": 16},
    "nemotron_h": {},
    "granitemoehybrid": {
        "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 4,
        "num_hidden_layers": 10,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
    },
}


@pytest.mark.parametrize("model_type", list(PUBLISHED))
@pytest.mark.filterwarnings("ignore")
def test_published_sizes_are_shrunk_and_probed_quickly(model_type):
    with torch.device("meta"):
        decoder = AutoModel.from_config(AutoConfig.for_model(model_type, **PUBLISHED[model_type]))
    small = small_copy(decoder)
    assert sum(p.numel() for p in small.parameters()) < 3_000_000
    assert kinds_of(small) >= kinds_of(decoder)
    began = time.process_time()
    verdict = probe(decoder)
    assert verdict.packs == has_masks_by_request(decoder.config), verdict.reason
    assert time.process_time() - began < 10


@pytest.mark.parametrize("name", ["qwen3_next", "doge", "deepseek_v32", "phimoe+longrope"])
def test_verdicts_are_kept(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(moelora.models.verdicts, "_known", {})
    model_class, config = runnable(name)
    made = []

    def decoder():
        made.append(1)
        with torch.device("meta"):
            return decoder_of(model_class(config))

    first = find_verdict(model_class, config, decoder)
    moelora.models.verdicts._known.clear()
    assert find_verdict(model_class, config, decoder) == first
    assert len(made) == 1
    (file,) = cache_folder().glob("*.json")
    assert Architecture.from_json(json.loads(file.read_text())) == first
    odd = json.dumps({**first.to_json(), "packs": "false"})
    for spoilt in ("", "{", "[]", '{"packs": true}', odd):
        file.write_text(spoilt)
        moelora.models.verdicts._known.clear()
        assert find_verdict(model_class, config, decoder) == first
    assert len(made) == 6
    other = copy.deepcopy(config)
    other.rms_norm_eps = 0.5
    find_verdict(model_class, other, decoder)
    assert len(made) == 7


def test_random_numbers_of_the_process_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    probe(unheard_of("olmoe"))
    assert torch.equal(torch.rand(4), expected)


def test_a_looped_module_keeps_no_memory_of_other_requests(tmp_path):
    """Dynamic rotary embeddings grow with the longest request seen; a row must not depend on what ran before."""
    model_class, config = tiny("mixtral+dynamic")
    make(model_class, config, seed=4).save_pretrained(tmp_path)
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    short = Request(token_ids=[9, 8, 7, 6, 5])
    before = engine.score([short])[0]
    engine.score([Request(token_ids=list(range(3, 43)))])
    assert engine.score([short])[0].token_logprobs == before.token_logprobs


def test_a_module_tree_without_layers_is_no_reason_to_fail():
    class Flat(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size)

    verdict = probe(Flat(tiny_config("llama")))
    assert not verdict.packs
    assert verdict.reason
