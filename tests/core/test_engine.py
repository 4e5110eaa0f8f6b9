"""A row's scores belong to the row: mixed batches against solo runs, and what the engine refuses."""

import json
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moelora import (
    BASE_ADAPTER,
    AdapterError,
    CheckpointError,
    ConfigError,
    EngineOptions,
    GraphMode,
    PrefillEngine,
    Request,
    RequestError,
)
from moelora.graphs.eager import EagerRunner
from tiny_models import VOCAB, peft_adapter, reference_logprobs, save_model

SOLO_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model and four adapters that touch different parts of it."""
    folder = tmp_path_factory.mktemp("world")
    model = save_model(folder / "model", "qwen3_moe", seed=1)
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    peft_adapter(folder / "attention", model, 2, rank=8, target_modules=["q_proj", "v_proj"])
    peft_adapter(folder / "experts", model, 3, rank=2, target_modules=[], **experts)
    peft_adapter(folder / "both", model, 4, rank=3, target_modules=["o_proj"], **experts)
    peft_adapter(folder / "head", model, 5, rank=5, target_modules=["lm_head", "embed_tokens"])
    return folder


NAMES = ["attention", "experts", "both", "head"]


def make_engine(world, names=NAMES, **options):
    return PrefillEngine(
        world / "model", adapters={n: world / n for n in names}, options=EngineOptions(**{"device": "cpu", **options})
    )


@pytest.fixture(scope="module")
def engine(world):
    return make_engine(world, max_tokens=300)


@pytest.fixture(scope="module")
def narrow(world):
    """Two slots for four adapters, and batches of at most five requests."""
    return make_engine(world, slots=2, max_tokens=64, max_requests=5)


@pytest.fixture(scope="module")
def lonely(world):
    """One request per batch."""
    return make_engine(world, max_requests=1)


def difference(one, other):
    assert len(one.token_logprobs) == len(other.token_logprobs)
    values = [abs(a - b) for a, b in zip(one.token_logprobs[1:], other.token_logprobs[1:])]
    values.append(abs(one.next_token.logprob - other.next_token.logprob))
    values += [abs(a.logprob - b.logprob) for a, b in zip(one.choices, other.choices, strict=True)]
    return max(values)


adapters = st.sampled_from([*NAMES, BASE_ADAPTER])
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
choices = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), max_size=3)
requests = st.builds(Request, token_ids=tokens, adapter=adapters, choices=choices, top_k=st.integers(0, 3))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(requests, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_a_mixed_shuffled_ragged_batch_equals_solo_runs(engine, narrow, lonely, given_requests, rng):
    alone = lonely.score(given_requests)
    order = list(range(len(given_requests)))
    rng.shuffle(order)
    for many in (engine, narrow):
        mixed = many.score([given_requests[i] for i in order])
        for position, i in enumerate(order):
            assert difference(mixed[position], alone[i]) < SOLO_TOLERANCE


@pytest.mark.parametrize(
    "pattern",
    [
        [BASE_ADAPTER, "both"],
        ["both", BASE_ADAPTER],
        [BASE_ADAPTER, "both", BASE_ADAPTER, "head"],
        ["head", "both", "head", "both", BASE_ADAPTER, "head"],
        [BASE_ADAPTER] * 3,
        NAMES,
    ],
)
def test_base_rows_first_last_between_and_alone(engine, lonely, pattern):
    lengths = [1, 7, 2, 31, 5, 16]
    rows = [
        Request(token_ids=[(3 * i + j) % VOCAB for j in range(lengths[i])], adapter=a) for i, a in enumerate(pattern)
    ]
    for mixed, alone in zip(engine.score(rows), lonely.score(rows), strict=True):
        assert difference(mixed, alone) < SOLO_TOLERANCE


def test_equal_prompts_under_different_adapters_differ_and_equal_solo(engine, lonely):
    rows = [Request(token_ids=list(range(20)), adapter=a) for a in [*NAMES, BASE_ADAPTER]]
    scores = engine.score(rows)
    assert len({round(r.logprob_sum, 3) for r in scores}) == len(rows)
    for mixed, alone in zip(scores, lonely.score(rows), strict=True):
        assert difference(mixed, alone) < SOLO_TOLERANCE


def test_seventy_requests(engine, lonely):
    rng = random.Random(0)
    rows = [
        Request(
            token_ids=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))],
            adapter=rng.choice([*NAMES, BASE_ADAPTER]),
        )
        for _ in range(70)
    ]
    for mixed, alone in zip(engine.score(rows), lonely.score(rows), strict=True):
        assert difference(mixed, alone) < SOLO_TOLERANCE


def test_base_rows_do_not_notice_adapters(world, engine):
    """Base scores are the same bits with no adapter known, with adapters idle, and after adapters ran."""
    rows = [Request(token_ids=[5, 9, 2, 7]), Request(token_ids=list(range(30)))]
    without = make_engine(world, names=[]).score(rows)
    idle = make_engine(world).score(rows)
    engine.score([Request(token_ids=[1, 2, 3], adapter=a) for a in NAMES])
    after = engine.score(rows)
    for a, b, c in zip(without, idle, after, strict=True):
        assert a.token_logprobs == b.token_logprobs == c.token_logprobs


def test_repeated_loads_leave_the_scores_alone(narrow):
    """Slots are written whole: five rounds through two slots give the same bits every time."""
    rows = [Request(token_ids=list(range(12)), adapter=a) for a in NAMES]
    first = narrow.score(rows)
    for _ in range(4):
        assert [r.token_logprobs for r in narrow.score(rows)] == [r.token_logprobs for r in first]


def test_a_small_rank_after_a_large_one_in_the_same_slot(world, lonely):
    one_slot = make_engine(world, slots=1)
    rows = [Request(token_ids=list(range(9)), adapter=a) for a in ("attention", "both", "attention", "experts")]
    for row in rows:
        (got,) = one_slot.score([row])
        (alone,) = lonely.score([row])
        assert difference(got, alone) < SOLO_TOLERANCE


def test_entries_are_aligned_with_tokens(world, lonely):
    """Entry 0 is null, entry i is log p(t_i | t_<i), and the next token follows the last one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world / "model", attn_implementation="eager").eval()
    ids = [4, 8, 15, 16, 23]
    (result,) = lonely.score([Request(token_ids=ids, top_k=3)])
    assert result.token_logprobs[0] is None
    torch.testing.assert_close(
        torch.tensor(result.token_logprobs[1:]), reference_logprobs(model, ids), atol=1e-5, rtol=0
    )
    with torch.no_grad():
        last = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
    best = last.topk(3)
    assert [t.token_id for t in result.top_logprobs] == best.indices.tolist()
    assert result.next_token == result.top_logprobs[0]
    assert result.logprob_sum == math.fsum(result.token_logprobs[1:])


def test_choices_equal_the_whole_sequence(lonely):
    context, options = [3, 5, 7], [[9], [11, 13, 17], [9, 11]]
    (result,) = lonely.score([Request(token_ids=context, adapter="both", choices=options)])
    for choice, ids in zip(result.choices, options, strict=True):
        (whole,) = lonely.score([Request(token_ids=context + ids, adapter="both")])
        assert choice.num_tokens == len(ids)
        assert abs(choice.logprob - math.fsum(whole.token_logprobs[len(context) :])) < 1e-5
    assert len(result.token_logprobs) == len(context)


@pytest.mark.parametrize(("start", "entries"), [(0, 16), (10, 6), (15, 1), (16, 0)])
def test_score_from(lonely, start, entries):
    ids = list(range(16))
    (whole,) = lonely.score([Request(token_ids=ids)])
    (part,) = lonely.score([Request(token_ids=ids, score_from=start)])
    assert part.token_logprobs == whole.token_logprobs[start:]
    assert len(part.token_logprobs) == entries


def test_one_token_has_one_null_entry_and_a_next_token(engine):
    (result,) = engine.score([Request(token_ids=[3])])
    assert result.token_logprobs == [None]
    assert result.logprob_sum == 0.0
    assert math.isfinite(result.next_token.logprob)


def test_a_sequence_longer_than_the_budget_runs_alone(narrow, lonely):
    row = Request(token_ids=[i % VOCAB for i in range(200)], adapter="experts")
    assert difference(narrow.score([row])[0], lonely.score([row])[0]) < SOLO_TOLERANCE


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Request(token_ids=[]), "no tokens"),
        (Request(token_ids=[VOCAB]), f"token id {VOCAB}"),
        (Request(token_ids=[-1]), "token id -1"),
        (Request(token_ids=[2**40]), "token id 1099511627776"),
        (Request(token_ids=[0] * 257), "256 positions"),
        (Request(token_ids=[0] * 255, choices=[[1, 2]]), "256 positions"),
        (Request(token_ids=[0], choices=[[1], []]), "choice 1 has no tokens"),
        (Request(token_ids=[0], adapter="Both"), "Did you mean 'both'"),
        (Request(token_ids=[0], adapter=""), "unknown adapter"),
        (Request(token_ids=[0], top_k=VOCAB + 1), "top_k"),
        (Request(token_ids=[0], score_from=2), "score_from"),
    ],
)
def test_a_bad_request_costs_only_itself(engine, row, said):
    good = Request(token_ids=[1, 2, 3], adapter="both")
    results = dict(engine.score_stream([good, row, good]))
    assert said in results[1].error
    assert results[0].error is None
    assert results[0].token_logprobs == results[2].token_logprobs
    with pytest.raises(RequestError, match="request 1"):
        engine.score([good, row])


@pytest.mark.parametrize(
    "asked", [{"return_dict": False}, {"output_hidden_states": True, "output_router_logits": True}]
)
def test_what_a_config_asks_to_return_besides_is_not_kept(tmp_path, asked):
    model = save_model(tmp_path, "qwen3_moe")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **asked}), encoding="utf-8")
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    returned = []
    engine._base.body.register_forward_hook(lambda module, args, result: returned.append(result))
    ids = [5, 9, 11, 3, 8]
    (result,) = engine.score([Request(token_ids=ids)])
    assert [list(one) for one in returned] == [["last_hidden_state"]]
    assert result.token_logprobs[1:] == pytest.approx(reference_logprobs(model, ids), abs=SOLO_TOLERANCE)


def test_a_nan_model_is_told_not_hidden(tmp_path):
    model = save_model(tmp_path, "qwen3", seed=1)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    (result,) = PrefillEngine(tmp_path, options=EngineOptions(device="cpu")).score([Request(token_ids=[1, 2])])
    assert "log-probability of token 1 is nan" in result.error


def test_a_batch_that_does_not_fit_into_memory_is_split(world, lonely, monkeypatch):
    said = []
    engine = PrefillEngine(
        world / "model", adapters={"both": world / "both"}, options=EngineOptions(device="cpu"), on_event=said.append
    )
    original = engine._runner.run

    def small(batch):
        if batch.num_tokens > 40:
            raise torch.OutOfMemoryError
        return original(batch)

    monkeypatch.setattr(engine._runner, "run", small)
    rows = [Request(token_ids=list(range(n)), adapter="both") for n in (30, 20, 25, 60, 5)]
    results = dict(engine.score_stream(rows))
    assert "out of device memory at 60 tokens" in results[3].error
    for i in (0, 1, 2, 4):
        assert difference(results[i], lonely.score([rows[i]])[0]) < SOLO_TOLERANCE
    assert engine.report()["memory_splits"] >= 2
    assert any("out of device memory" in text for text in said)


def test_options_that_cannot_be_honoured(world):
    for options, said in [
        ({"backend": "tritn"}, "Did you mean 'triton'"),
        ({"device": "cuda:99"}, "CUDA device"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"batch_invariant": True}, "batch"),
        ({"load_format": "gguf"}, "load format"),
        ({"graph": "fulll"}, "unknown graph mode 'fulll'. Did you mean 'full'?"),
        ({"max_tokens": "4k"}, "max_tokens must be an integer, got '4k'"),
        ({"buckets": (64, 16)}, "buckets must ascend, got 64, 16"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make_engine(world, **options)
    with pytest.raises(AdapterError, match="__base__"):
        PrefillEngine(world / "model", adapters={BASE_ADAPTER: world / "both"}, options=EngineOptions(device="cpu"))


def test_a_dtype_that_is_none_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"unknown dtype 'bf16'\. Did you mean 'bfloat16'\? Valid: auto, bfloat16, "):
        EngineOptions(dtype="bf16")


def test_the_value_of_a_graph_mode_stands_for_it():
    assert EngineOptions(graph="off").graph is GraphMode.OFF


def test_the_report_counts(world):
    engine = make_engine(world, slots=2, max_tokens=64)
    engine.score([Request(token_ids=list(range(30)), adapter=a) for a in NAMES])
    report = engine.report()
    assert report["adapter_loads"] == 4
    assert report["tokens"] == 120
    assert sum(p["count"] for p in report["passes"]) == 2
    assert report["eager_reasons"] == {"no_graph_device": 2}
    assert report["bytes_per_slot"] > 0


def test_fifty_adapters_load_the_base_once(world, monkeypatch):
    import moelora.engine

    loads = []
    original = moelora.engine.load_base
    monkeypatch.setattr(moelora.engine, "load_base", lambda *a, **k: loads.append(1) or original(*a, **k))
    names = {f"a{i:02}": world / NAMES[i % 4] for i in range(50)}
    engine = PrefillEngine(world / "model", adapters=names, options=EngineOptions(device="cpu", slots=2))
    results = engine.score([Request(token_ids=[1, 2, 3, 4], adapter=n) for n in names])
    assert len(loads) == 1
    assert engine.report()["adapter_loads"] == 50
    for i, result in enumerate(results):
        assert result.token_logprobs == results[i % 4].token_logprobs


def test_a_single_request_and_a_list_of_adapters_are_refused_with_what_to_give(tmp_path):
    save_model(tmp_path, "qwen3_moe")
    with pytest.raises(AdapterError, match="must map names to folders, got list"):
        PrefillEngine(tmp_path, adapters=["x"], options=EngineOptions(device="cpu"))
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    with pytest.raises(RequestError, match="a list of requests"):
        engine.score(Request(token_ids=[1]))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (RuntimeError("float != c10::BFloat16"), CheckpointError),
        (NotImplementedError("no such kernel"), CheckpointError),
        (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError),
    ],
)
def test_what_the_models_code_raises_is_said_with_architecture_and_dtype(world, monkeypatch, fault, expected):
    def run(*given):
        raise fault

    monkeypatch.setattr(EagerRunner, "run", run)
    with pytest.raises(expected) as raised:
        make_engine(world, dtype="bfloat16")
    if expected is CheckpointError:
        assert str(raised.value) == f"moelora cannot run qwen3_moe in bfloat16 ({type(fault).__name__}: {fault})"


@pytest.mark.parametrize("options", [{"device": "cpu"}, None, "cpu"])
def test_options_of_another_type_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=f"must be EngineOptions, got {type(options).__name__}"):
        PrefillEngine("nowhere", options=options)


def test_a_run_without_adapters_says_so_of_a_row_that_names_one(tmp_path):
    save_model(tmp_path, "qwen3_moe")
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    assert engine.check(Request(token_ids=[1], adapter="x")) == "unknown adapter 'x': no adapters were given"
