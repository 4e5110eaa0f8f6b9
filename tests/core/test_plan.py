"""A plan says beforehand what a run's report says afterwards."""

import json

import pytest
import torch

import moelora.engine
import moelora.jobs.plan
import moelora.memory
from moelora import AdapterError, ConfigError, EngineOptions, PrefillEngine, Request
from moelora.capacity import EagerReason
from moelora.jobs.plan import PlanningEngine
from moelora.jobs.rows import parse_rows
from moelora.jobs.run import JobOptions, PrefillJob
from moelora.jobs.text import TextEncoder
from moelora.jobs.writer import Discard
from moelora.types import GraphMode
from tiny_models import VOCAB, peft_adapter, save_model

EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": []}
NAMES = ["attention", "experts", "saved", "head"]


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    model = save_model(folder / "model", "qwen3_moe", seed=1)
    peft_adapter(folder / "attention", model, 2, rank=8, target_modules=["q_proj"])
    peft_adapter(folder / "experts", model, 3, rank=2, **EXPERTS)
    peft_adapter(folder / "head", model, 5, rank=5, target_modules=["lm_head", "embed_tokens"])
    # Last, since PEFT leaves the saved module in the base.
    peft_adapter(folder / "saved", model, 4, rank=3, target_modules=["v_proj"], modules_to_save=["lm_head"])
    save_model(folder / "alone", "qwen3_next", seed=1)
    save_model(folder / "tied", "qwen3", seed=1)
    return folder


def rows(count=60):
    """Rows of all kinds: one adapter, several, all, with choices, too long, of unknown adapters, broken."""
    generator = torch.Generator().manual_seed(5)
    lines = []
    for i in range(count):
        row = {"prompt_token_ids": torch.randint(0, VOCAB, (1 + 7 * i % 40,), generator=generator).tolist()}
        if i % 3:
            row["adapter"] = [NAMES[i % 4], "__base__"] if i % 2 else NAMES[i % 4]
        if i % 5 == 0:
            row["choices_token_ids"] = [[1, 2, 3], [4], [5], [1, 2]]
        if i % 11 == 4:
            row = {"prompt_token_ids": [5] * 300}
        if i % 11 == 5:
            row["adapter"] = "nobody"
        lines.append((i + 1, b"{" if i % 11 == 6 else json.dumps(row).encode()))
    return parse_rows(lines)


def run(engine, **job_options):
    job = PrefillJob(engine, TextEncoder(None), JobOptions(**job_options))
    stats = job.run(rows(), Discard())
    return {f: getattr(stats, f) for f in stats.__dataclass_fields__ if f != "twins"}, engine.report()


def both(folder, model="model", names=NAMES, job_options=None, **options):
    adapters = {name: folder / name for name in names}
    chosen = EngineOptions(**{"device": "cpu", **options})
    planned = run(PlanningEngine(folder / model, adapters=adapters, options=chosen), **(job_options or {}))
    real = run(PrefillEngine(folder / model, adapters=adapters, options=chosen), **(job_options or {}))
    return planned, real


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 64, "slots": 2},
        {"max_tokens": 10, "slots": 2},
        {"max_tokens": 300, "max_requests": 3, "slots": 1, "graph": GraphMode.OFF},
        {"slots": 3, "dtype": "bfloat16", "load_format": "dummy"},
        {"job_options": {"max_length": 20, "on_long": "truncate-left", "default_adapter": "head"}},
        {"names": [], "max_tokens": 100},
        {"model": "alone", "names": []},
    ],
    ids=str,
)
def test_the_plan_says_what_the_report_says(world, options, monkeypatch):
    for module in (moelora.engine, moelora.jobs.plan):
        monkeypatch.setattr(module, "WINDOW_REQUESTS", 25)
    (planned_stats, planned), (real_stats, real) = both(world, **options)
    assert planned_stats == real_stats
    assert real_stats["error_rows"] > 0
    if planned["longer_sequences"]:
        lasting = {"base", "bank", "static", "graphs", "score_chunk_rows", "adapters_host", "scoring_chunk"}
        planned_memory, real_memory = planned.pop("memory"), real.pop("memory")
        assert {key: planned_memory[key] for key in lasting} == {key: real_memory[key] for key in lasting}
        per_token = real_memory["activations"] // real["max_tokens"]
        assert planned_memory["activations"] == per_token * real["largest_batch"]
    shared = set(planned) & set(real)
    assert {
        "passes",
        "eager_reasons",
        "tokens",
        "padding_share",
        "largest_batch",
        "adapter_loads",
        "bytes_per_slot",
    } <= shared
    assert {key: planned[key] for key in shared} == {key: real[key] for key in shared}
    assert planned["batches"] == sum(one["count"] for one in real["passes"])


@pytest.mark.parametrize(("model", "names"), [("model", NAMES), ("model", []), ("tied", []), ("alone", [])])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_what_the_engine_allocates(world, model, names, dtype):
    adapters = {name: world / name for name in names}
    options = EngineOptions(device="cpu", dtype=dtype, slots=3)
    planned = PlanningEngine(world / model, adapters=adapters, options=options).memory
    engine = PrefillEngine(world / model, adapters=adapters, options=options)
    causal_lm, bank = engine._base.causal_lm, engine._bank
    held = {p.data_ptr(): p.nbytes for p in causal_lm.parameters()}
    assert planned.base == sum(held.values()) + sum(b.nbytes for b in causal_lm.buffers())
    for slot, name in enumerate(["saved", "head"] if names else []):
        bank.load(slot, engine._adapters.take(name))
    tensors = [t for s in bank.slots.values() for t in (getattr(s, n) for n in s.__dataclass_fields__) if t.ndim > 1]
    replaced = [t for _, t in bank.replaced_slots("lm_head")]
    assert planned.bank == sum(t.nbytes for t in (*tensors, *replaced))
    assert planned.static == 4 * engine._capacity.max_tokens
    rows = engine.report()["score_chunk_rows"]
    assert planned.scoring_chunk == rows * VOCAB * (4 + engine._base.dtype.itemsize)
    assert planned.adapters_host == sum(a.nbytes for a in engine._adapters.values())
    assert (planned.free, planned.fits) == (None, None)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_fits_has_room_for_the_longest_sequence(world, monkeypatch, backend):
    """As much as a run with batches of its length needs, but for buffers, which are those of `max_tokens`."""

    def planned(free, max_tokens):
        monkeypatch.setattr(moelora.memory, "free_device_memory", lambda device: (free, 1 << 40))
        options = EngineOptions(device="cpu", backend=backend, max_tokens=max_tokens, score_chunk_rows=1)
        engine = PlanningEngine(world / "model", adapters={}, options=options)
        lengths = [40, 7, 64, 250, 3, 65]
        requests = [Request(token_ids=[1] * n) for n in lengths] + [Request(token_ids=[1] * 257)]
        results = dict(engine.score_stream(requests))
        assert [results[i].error is None for i in range(len(requests))] == [True] * len(lengths) + [False]
        return engine.memory

    short, long = planned(1 << 30, 64), planned(1 << 30, 250)
    parts = ("base", "bank", "activations", "scoring_chunk")
    assert [getattr(short, part) for part in parts] == [getattr(long, part) for part in parts]
    assert short.static < long.static
    assert planned(short.needed, 64).fits is True
    assert planned(short.needed - 1, 64).fits is False


def test_a_plan_loads_no_weights(world, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    monkeypatch.setattr("moelora.adapters.values.Loading.factors", refuse)
    adapters = {name: world / name for name in NAMES}
    run(PlanningEngine(world / "model", adapters=adapters, options=EngineOptions(device="cpu")))


def test_batches_are_admitted_to_buckets(world, monkeypatch):
    """As on a device with graphs: buckets, padding, and the reasons of the batches that fall out."""
    monkeypatch.setattr(PlanningEngine, "_graphs", lambda self: (GraphMode.FULL, None))
    options = EngineOptions(device="cpu", max_tokens=160, buckets=(16, 100))
    engine = PlanningEngine(world / "model", adapters={}, options=options)
    for lengths in [(40, 60), (30,), (8,), (160,), (2,) * 40]:
        list(engine.score_stream([Request(token_ids=[1] * n) for n in lengths]))
    report = engine.report()
    assert [(one["mode"], one["bucket"], one["count"]) for one in report["passes"] if one["bucket"]] == [
        ("full", 100, 1),
        ("full", 16, 1),
    ]
    assert report["eager_reasons"] == {
        EagerReason.BUCKET_TOO_SPARSE: 1,
        EagerReason.TOKENS_OVER_LARGEST_BUCKET: 1,
        EagerReason.REQUESTS_OVER_SLOTS: 1,
    }
    assert report["padding_share"] == pytest.approx(8 / (100 + 30 + 8 + 160 + 80 + 8))


def test_what_the_engine_refuses_the_plan_refuses(world, tmp_path):
    for options, said in [
        ({"backend": "tritn"}, "Did you mean 'triton'"),
        ({"buckets": (4096,), "max_tokens": 64}, "buckets must lie in"),
        ({"batch_invariant": True}, "batch-invariantly"),
    ]:
        for kind in (PlanningEngine, PrefillEngine):
            with pytest.raises(ConfigError, match=said):
                kind(world / "model", adapters={}, options=EngineOptions(device="cpu", **options))
    with pytest.raises(AdapterError, match="no such folder"):
        PlanningEngine(world / "model", adapters={"a": tmp_path / "a"}, options=EngineOptions(device="cpu"))
