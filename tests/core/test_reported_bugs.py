"""Faults that users of inference engines met elsewhere, as inputs: engines on tiny models, with the right values."""

import json
import random
import threading

import pytest
import torch

from adapter_writers import PREFIX, write_adapter
from moelora import BASE_ADAPTER, AdapterError, CheckpointError, EngineOptions, PrefillEngine, Request
from moelora.scoring.head import _best
from tiny_models import VOCAB, make_model, reference_logprobs, save_model

TOLERANCE = 1e-5
LENGTHS = (1, 7, 2, 31, 5, 16)


def random_factors(module, out, into, rank, seed):
    torch.manual_seed(seed)
    a, b = 0.3 * torch.randn(rank, into), 0.3 * torch.randn(out, rank)
    return {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model; adapters on q_proj of ranks 8 and 64, on the head alone, on the router alone, and with whole weights."""
    folder = tmp_path_factory.mktemp("world")
    save_model(folder / "model", "qwen3_moe", seed=3)
    query = "model.layers.1.self_attn.q_proj"
    write_adapter(folder / "r8", random_factors(query, 64, 32, 8, 1), r=8)
    write_adapter(folder / "r64", random_factors(query, 64, 32, 64, 2), r=64, use_rslora=True)
    write_adapter(folder / "head", random_factors("lm_head", VOCAB, 32, 4, 3))
    write_adapter(folder / "head2", random_factors("lm_head", VOCAB, 32, 2, 4), r=2)
    write_adapter(folder / "router", random_factors("model.layers.0.mlp.gate", 6, 32, 4, 5))
    whole = {
        f"{PREFIX}lm_head.weight": torch.randn(VOCAB, 32),
        f"{PREFIX}model.embed_tokens.weight": torch.randn(VOCAB, 32),
    }
    whole |= random_factors(query, 64, 32, 4, 6)
    write_adapter(folder / "whole", whole, modules_to_save=["lm_head", "embed_tokens"])
    return folder


NAMES = ["r8", "r64", "head", "head2", "router", "whole"]


def make_engine(world, names=NAMES, **options):
    adapters = {name: world / name for name in names}
    return PrefillEngine(world / "model", adapters=adapters, options=EngineOptions(device="cpu", **options))


@pytest.fixture(scope="module")
def engine(world):
    return make_engine(world)


@pytest.fixture(scope="module")
def lonely(world):
    return make_engine(world, max_requests=1, slots=1)


def prompt(length, seed=0):
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def assert_equal(one, other, tolerance=TOLERANCE):
    assert one.next_token.logprob == pytest.approx(other.next_token.logprob, abs=tolerance)
    assert one.token_logprobs[1:] == pytest.approx(other.token_logprobs[1:], abs=tolerance)


def merged(world, name):
    """The base with one adapter's weights added or replaced by hand."""
    from safetensors.torch import load_file

    model = make_model("qwen3_moe", seed=3)
    tensors = load_file(world / name / "adapter_model.safetensors")
    scale = {"r8": 1.0, "r64": 1.0, "head": 2.0, "head2": 4.0, "router": 2.0, "whole": 2.0}[name]
    with torch.no_grad():
        for key, a in tensors.items():
            module = key.removeprefix(PREFIX)
            if module.endswith(".lora_A.weight"):
                delta = scale * tensors[key.replace("lora_A", "lora_B")] @ a
                model.get_submodule(module.removesuffix(".lora_A.weight")).weight += delta
            elif "lora" not in module:
                model.get_parameter(module).copy_(a)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_adapter_equals_weights_merged_by_hand_beside_others(world, engine, name):
    requests = [Request(token_ids=prompt(n), adapter=a) for n in (63, 1, 5) for a in (*NAMES, BASE_ADAPTER)]
    model = merged(world, name)
    for request, result in zip(requests, engine.score(requests)):
        if request.adapter == name and len(request.token_ids) > 1:
            want = reference_logprobs(model, list(request.token_ids)).tolist()
            assert result.token_logprobs[1:] == pytest.approx(want, abs=1e-4)


def test_interleaved_adapters_of_unequal_ranks_and_lengths(engine, lonely):
    order = ["r8", "r64", "r8", "r64", BASE_ADAPTER, "r8"]
    requests = [Request(token_ids=prompt(n), adapter=name) for n, name in zip(LENGTHS, order, strict=True)]
    for mixed, alone in zip(engine.score(requests), lonely.score(requests)):
        assert_equal(mixed, alone)


def test_a_base_batch_after_an_adapter_batch_is_that_of_an_engine_without_adapters(world, engine):
    bare = make_engine(world, names=[])
    adapted = [Request(token_ids=prompt(9, i), adapter="r64") for i in range(8)]
    plain = [Request(token_ids=prompt(9, i)) for i in range(8)]
    engine.score(adapted)
    assert [r.token_logprobs for r in engine.score(plain)] == [r.token_logprobs for r in bare.score(plain)]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_more_adapters_than_slots_in_any_order(world, lonely, slots):
    requests = [Request(token_ids=prompt(4, i), adapter=NAMES[i * 5 % 6]) for i in range(24)]
    many = make_engine(world, slots=slots, max_tokens=10)
    assert sorted(index for index, _ in many.score_stream(requests)) == list(range(24))
    for mixed, alone in zip(many.score(requests), lonely.score(requests)):
        assert_equal(mixed, alone)


def test_shared_beginnings_do_not_depend_on_the_order(engine):
    start = prompt(32)
    requests = [Request(token_ids=[*start, *prompt(3, i)], adapter="r8") for i in range(4)]
    requests.append(requests[0])
    forth, back = engine.score(requests), engine.score(requests[::-1])[::-1]
    for one, other in zip(forth, back):
        assert_equal(one, other)
    assert_equal(forth[0], forth[4])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", TOLERANCE), ("bfloat16", 0.25), ("float16", 0.05)])
def test_neighbours_of_any_length_leave_a_row_alone(world, dtype, tolerance):
    one = make_engine(world, names=["r8"], dtype=dtype)
    requests = [Request(token_ids=prompt(n), adapter="r8") for n in (1, 16, 127, 128, 129, 255)]
    for mixed, request in zip(one.score(requests), requests):
        (alone,) = one.score([request])
        assert mixed.error is None  # nothing but finite numbers
        assert_equal(mixed, alone, tolerance)


def test_scores_begin_with_the_token_that_follows_the_first(world, engine):
    ids = prompt(5)
    with torch.no_grad():
        logits = make_model("qwen3_moe", seed=3)(input_ids=torch.tensor([ids])).logits[0]
    table = torch.log_softmax(logits, dim=-1)
    (result,) = engine.score([Request(token_ids=ids)])
    assert result.token_logprobs[0] is None
    assert result.token_logprobs[1:] == pytest.approx([float(table[i - 1, ids[i]]) for i in range(1, 5)], abs=1e-4)
    assert result.next_token.logprob == pytest.approx(float(table[4].max()), abs=1e-4)


def test_a_large_top_k_is_kept_for_the_last_token_of_a_prompt_alone(engine, monkeypatch):
    import moelora.engine

    held = []
    original = moelora.engine.ScoringHead.score
    monkeypatch.setattr(moelora.engine.ScoringHead, "score", lambda *a, **k: held.append(original(*a, **k)) or held[-1])
    results = engine.score([Request(token_ids=prompt(100), top_k=VOCAB), Request(token_ids=prompt(50), top_k=2)])
    assert sum(scores.top_ids_MK.shape[0] for scores in held) == 2
    assert [len(result.top_logprobs) for result in results] == [VOCAB, 2]


def test_equal_logits_are_ranked_by_id_whatever_k_is():
    logits = (4 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))).round() / 4
    logits[1] = -0.0
    logits[1, 3] = 0.0
    logits[2, 7] = float("-inf")
    rows = torch.tensor([0, 1, 2, 4])
    for k in (1, 3, 50):
        values, ids = _best(logits, rows, k)
        for m, row in enumerate(rows.tolist()):
            want = sorted(range(50), key=lambda i: (-float(logits[row, i]), i))[:k]
            assert ids[m].tolist() == want
            assert values[m].tolist() == [float(logits[row, i]) for i in want]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"token_ids": [5.9, 6]}, r"token_ids\[0\] must be an integer, got 5.9"),
        ({"token_ids": [True, 6]}, r"token_ids\[0\] must be an integer"),
        ({"token_ids": "567"}, "token_ids must be a sequence of integers, got str"),
        ({"token_ids": {5, 6}}, "got set"),
        ({"token_ids": None}, "got NoneType"),
        ({"token_ids": (i for i in range(3))}, "got generator"),
        ({"token_ids": [5], "choices": ["ab"]}, r"choices\[0\] must be a sequence"),
        ({"token_ids": [5], "choices": [[5.5]]}, r"choices\[0\]\[0\] must be an integer"),
        ({"token_ids": [5], "adapter": None}, "adapter must be a name"),
        ({"token_ids": [5], "top_k": 1.5}, "top_k must be an integer"),
        ({"token_ids": [5], "score_from": "0"}, "score_from must be an integer"),
        ({"token_ids": [5, 2**40]}, "outside the vocabulary"),
    ],
)
def test_a_request_of_wrong_types_costs_itself_alone(engine, row, said):
    good = Request(token_ids=[1, 2, 3])
    results = dict(engine.score_stream([good, Request(**row), good]))
    assert len(results) == 3
    assert results[0].error is results[2].error is None
    with pytest.raises(ValueError, match=said):
        engine.score([Request(**row)])


def test_arrays_and_generators_of_requests_are_taken(engine):
    import numpy

    want = engine.score([Request(token_ids=[5, 6, 7], choices=[[8, 9]])])
    for ids in (numpy.array([5, 6, 7]), torch.tensor([5, 6, 7]), range(5, 8), [numpy.int32(i) for i in (5, 6, 7)]):
        got = engine.score(Request(token_ids=ids, choices=numpy.array([[8, 9]])) for _ in range(1))
        assert got == want
        assert all(type(token) is int for token in got[0].choices[0].token_ids)


def test_threads_take_turns(world, engine):
    requests = [Request(token_ids=prompt(6, i), adapter=NAMES[i % 6]) for i in range(18)]
    want = engine.score(requests)
    other = make_engine(world, slots=2)
    failures = []

    def work(mine):
        try:
            for _ in range(5):
                for one, result in zip(mine.score(requests), want):
                    assert_equal(one, result)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (engine, engine, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_engine_uses_no_rotary_function_of_another_and_plain_models_none(world, monkeypatch):
    from moelora.models import rotary

    plain = make_model("qwen3_moe", seed=3)
    ids = prompt(6)
    want = reference_logprobs(plain, ids)
    fused = make_engine(world, names=["r8"], backend="triton", max_tokens=16)
    reference = make_engine(world, names=["r8"], backend="torch", max_tokens=16)
    calls = []
    original = rotary.rotate
    monkeypatch.setattr(rotary, "rotate", lambda *given, **how: calls.append(1) or original(*given, **how))
    (one,) = reference.score([Request(token_ids=ids, adapter="r8")])
    assert torch.equal(reference_logprobs(plain, ids), want)
    assert not calls
    (other,) = fused.score([Request(token_ids=ids, adapter="r8")])
    assert calls
    assert_equal(one, other, 1e-4)


def test_factors_that_vanish_in_the_model_s_dtype_are_refused(tmp_path, world):
    factors = random_factors("lm_head", VOCAB, 32, 4, 1)
    tiny = {name: tensor * 1e-9 if "lora_A" in name else tensor for name, tensor in factors.items()}
    write_adapter(tmp_path / "tiny", tiny)
    for dtype in ("float32", "bfloat16"):
        PrefillEngine(
            world / "model", adapters={"a": tmp_path / "tiny"}, options=EngineOptions(device="cpu", dtype=dtype)
        )
    with pytest.raises(AdapterError, match="become zero in float16"):
        PrefillEngine(
            world / "model", adapters={"a": tmp_path / "tiny"}, options=EngineOptions(device="cpu", dtype="float16")
        )


def test_a_config_of_impossible_numbers_is_refused(tmp_path):
    save_model(tmp_path, "qwen3_moe")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("head_dim")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))
    with pytest.raises(CheckpointError, match=r"no model can be made from .*config\.json"):
        PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
