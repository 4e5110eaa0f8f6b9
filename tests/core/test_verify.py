"""The comparison with transformers + PEFT: that it agrees where all is well, and does not where something is wrong."""

import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

import moelora.verify.reference as reference_module
import moelora.verify.run as run_module
from moelora import BASE_ADAPTER, ConfigError, EngineOptions, PrefillEngine, Request, Result
from moelora.errors import InputError
from moelora.jobs.rows import parse_rows
from moelora.jobs.run import JobOptions
from moelora.jobs.text import TextEncoder
from moelora.types import ChoiceScore, TokenScore
from moelora.verify.compare import Comparison, Tolerance
from moelora.verify.reference import ReferenceChoice, ReferenceKind
from moelora.verify.run import verify
from moelora.verify.sample import Spread, take_sample
from tiny_models import VOCAB, peft_adapter, save_model

EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": []}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    model = save_model(folder / "model", "qwen3_moe", seed=1)
    peft_adapter(folder / "attention", model, 2, rank=4, target_modules=["q_proj", "o_proj"])
    peft_adapter(folder / "experts", model, 3, rank=2, **EXPERTS)
    peft_adapter(folder / "saved", model, 4, rank=2, target_modules=["v_proj"], modules_to_save=["lm_head", "norm"])
    per_expert(folder / "old", ["gate_proj", "up_proj"], use_rslora=True)
    return folder


def per_expert(folder, projections, **config):
    """Keys per expert on two of six experts: PEFT refuses them, drops them or scales them wrongly."""
    torch.manual_seed(7)
    folder.mkdir()
    tensors = {}
    for layer, expert, projection in [(i, e, p) for i in range(2) for e in (1, 4) for p in projections]:
        key = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{projection}"
        tensors[f"{key}.lora_A.weight"] = 0.2 * torch.randn(3, 32)
        tensors[f"{key}.lora_B.weight"] = 0.2 * torch.randn(24, 3)
    save_file(tensors, folder / "adapter_model.safetensors")
    full = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": projections, **config}
    (folder / "adapter_config.json").write_text(json.dumps(full))


def rows(count=10, **more):
    generator = torch.Generator().manual_seed(5)
    lines = []
    for i in range(count):
        ids = torch.randint(0, VOCAB, (3 + 2 * i,), generator=generator).tolist()
        lines.append((i + 1, json.dumps({"prompt_token_ids": ids, **more}).encode()))
    return parse_rows(lines)


def check(world, names, given=None, job=None, **options):
    adapters = {name: world / name for name in names}
    verdict = verify(
        world / "model",
        rows() if given is None else given,
        TextEncoder(None),
        adapters=adapters,
        options=EngineOptions(**{"device": "cpu", **options}),
        job_options=job or JobOptions(),
        sample=3,
    )
    return verdict, {one.adapter: one for one in verdict.comparisons}


@pytest.mark.filterwarnings("ignore")
def test_everything_agrees_and_says_with_what(world):
    verdict, found = check(world, ["attention", "experts", "saved", "old"])
    assert verdict.failed == []
    assert {name: one.reference for name, one in found.items()} == {
        BASE_ADAPTER: "plain",
        "attention": "peft",
        "experts": "peft",
        "saved": "peft",
        "old": "merged",
    }
    assert "layout P" in found["old"].note
    for one in found.values():
        assert one.rows == 3
        assert 0 < one.largest < 1e-4
        assert 0 < one.mean <= one.largest
        assert one.greedy_agree == one.greedy_total == 3


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_is_left_out_is_noticed(world, monkeypatch):
    """The engine scores every row as the base's: the adapters' comparisons fail, the base's does not."""
    original = PrefillEngine.score

    def forgetful(self, requests, on_progress=None):
        plain = [Request(token_ids=r.token_ids, choices=r.choices) for r in requests]
        return original(self, plain, on_progress)

    monkeypatch.setattr(PrefillEngine, "score", forgetful)
    verdict, found = check(world, ["attention", "old"])
    assert verdict.failed == ["attention", "old"]
    assert found["attention"].largest > 0.1
    verdict, _ = check(world, ["attention", "old"], dtype="bfloat16")
    assert verdict.failed == ["attention", "old"]


@pytest.mark.filterwarnings("ignore")
def test_sixteen_bits_and_choices_agree(world):
    verdict, found = check(
        world, ["attention", "old"], rows(choices_token_ids=[[1, 2, 3], [4]], adapter="old"), dtype="bfloat16"
    )
    assert verdict.failed == []
    assert verdict.tolerance == Tolerance(nats=0.1, on="mean")
    assert found["old"].greedy_total == 9
    assert "no row names it" in found["attention"].note


def test_dummy_weights_are_the_same_on_both_sides(world):
    verdict, found = check(world, [], load_format="dummy")
    assert verdict.failed == []
    assert list(found) == [BASE_ADAPTER]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
        ("qwen3", {"target_modules": ["embed_tokens", "down_proj"]}),
        ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("gpt_oss", {**EXPERTS, "target_modules": ["q_proj"]}),
        ("deepseek_v3", {**EXPERTS, "target_modules": r".*shared_experts\.\w+_proj"}),
    ],
)
def test_merged_weights_equal_peft(tmp_path, monkeypatch, model_type, options):
    """Tied and untied heads, transposed experts, whole modules: both references lead to the same scores."""
    model = save_model(tmp_path / "model", model_type, seed=3)
    torch.manual_seed(4)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=9, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(0.0, 0.15)
    adapted.save_pretrained(tmp_path / "tuned")
    for layouts, expected in [(reference_module.PEFT_LAYOUTS, "peft"), (frozenset(), "merged")]:
        monkeypatch.setattr(reference_module, "PEFT_LAYOUTS", layouts)
        verdict, found = check(tmp_path, ["tuned"])
        assert found["tuned"].reference == expected
        assert verdict.failed == []
        assert found["tuned"].largest < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_what_peft_leaves_out_is_compared_with_merged_weights(tmp_path):
    """For this architecture PEFT takes projections by name for those of the routed experts, and no others."""
    save_model(tmp_path / "model", "deepseek_v3", seed=3)
    torch.manual_seed(4)
    tensors = {}
    for projection, out, into in (("gate_proj", 24, 32), ("up_proj", 24, 32), ("down_proj", 32, 24)):
        key = f"base_model.model.model.layers.1.mlp.shared_experts.{projection}"
        tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = torch.randn(3, into), torch.randn(out, 3)
    (tmp_path / "shared").mkdir()
    save_file(tensors, tmp_path / "shared" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (tmp_path / "shared" / "adapter_config.json").write_text(json.dumps(config))
    verdict, found = check(tmp_path, ["shared"])
    assert verdict.failed == []
    assert found["shared"].reference == "merged"
    assert found["shared"].note.startswith("PEFT ")


@pytest.mark.filterwarnings("ignore")
def test_nothing_of_an_adapter_stays_in_the_reference(tmp_path, monkeypatch):
    """Adapters one after the other on a tied model, with saved modules and merged weights between them."""
    model = save_model(tmp_path / "model", "qwen3", seed=3)
    peft_adapter(tmp_path / "plain", model, 2, target_modules=["q_proj"])
    peft_adapter(tmp_path / "tied", model, 3, target_modules=["embed_tokens", "v_proj"])
    peft_adapter(tmp_path / "saved", model, 4, target_modules=["q_proj"], modules_to_save=["norm"])
    choose = run_module.choose_reference
    merge = ReferenceChoice(kind=ReferenceKind.MERGED, reason="a test")
    monkeypatch.setattr(
        run_module, "choose_reference", lambda p, *a, **k: merge if p.name.startswith("m") else choose(p, *a, **k)
    )
    for name in ("plain", "tied", "saved"):
        (tmp_path / f"m-{name}").symlink_to(tmp_path / name)
    for names in (["m-tied", "tied", "saved", "plain"], ["tied", "m-saved", "plain", "m-plain", "m-tied"]):
        verdict, found = check(tmp_path, names)
        assert verdict.failed == []
        assert [found[name].reference for name in names] == [
            "merged" if name.startswith("m") else "peft" for name in names
        ]


def test_without_peft_the_remedy_is_named(world, monkeypatch):
    monkeypatch.setattr(reference_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"python -m pip install 'moelora\[verify\]'"):
        check(world, ["old", "attention"])
    verdict, _ = check(world, ["old"])
    assert verdict.failed == []


# The sample.


def test_a_spread_covers_the_stream():
    for count in (1, 3, 4, 5, 9, 100, 1000):
        spread = Spread(4)
        for line in range(count):
            spread.add(line, Request(token_ids=[line]))
        lines = [line for line, _ in spread.chosen()]
        assert len(lines) == min(count, 4)
        assert lines == sorted(set(lines))
        assert lines[0] == 0
        assert lines[-1] >= count // 2


def test_a_sample_holds_every_adapter():
    stream = [(i, Request(token_ids=[i], adapter="a" if i % 10 else "b")) for i in range(100)]
    taken = take_sample(stream, ["a", "b", "c"], 2)
    assert [r.adapter for r in taken.requests] == [BASE_ADAPTER] * 2 + ["a"] * 2 + ["b"] * 2 + ["c"] * 2
    assert taken.borrowed == ("c",)
    assert taken == take_sample(stream, ["a", "b", "c"], 2)
    with pytest.raises(InputError, match="nothing to compare"):
        take_sample([], ["a"], 2)


# The arithmetic.


def result(logprobs, *, next_id=1, choice=-3.0):
    choices = [ChoiceScore(token_ids=(1, 2), logprob=choice, num_tokens=2, is_greedy=False)]
    return Result(num_tokens=3, token_logprobs=logprobs, next_token=TokenScore(next_id, -1.0), choices=choices)


def test_differences_are_added_up():
    one = Comparison(adapter="a", reference="peft")
    one.add(3, result([None, -1.0, -2.0]), result([None, -1.0, -2.5], next_id=2, choice=-2.8))
    one.add(5, result([None, -1.0]), result([None, -1.25]))
    assert (one.rows, one.tokens) == (2, 9)
    assert (one.largest, one.worst_line) == (0.5, 3)
    assert one.mean == pytest.approx((0.5 + 0.2 + 0.25) / 9)
    assert (one.greedy_agree, one.greedy_total) == (3, 4)


def test_a_score_that_is_no_number_never_agrees():
    one = Comparison(adapter="a", reference="peft")
    one.add(1, result([None, math.nan]), result([None, math.nan]))
    for dtype in (torch.float32, torch.bfloat16):
        assert not Tolerance.of(dtype, 1e9).admits(one)
