"""Full and breakable prefill graphs on a GPU: replays against the eager run of the same padded batch, bit for bit."""

import gc
import time
from functools import partial

import pytest
import torch

from gpu.graph_world import (
    QWEN3_30B_A3B,
    SMALL,
    make_engine,
    mixed_requests,
    values,
    write_adapter,
    write_adapters,
    write_config,
)
from moelora import AdapterError, GraphMode, Request, RunMode
from moelora.graphs.base import BodyOutput
from moelora.graphs.recorder import CudaRecorder
from moelora.models.catalogue import build_catalogue
from tiny_models import CONFIGS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = ["triton", "csgmv"]
MODES = [GraphMode.FULL, GraphMode.BREAKABLE]
BUCKETS = tuple(2**i for i in range(4, 15))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    model = write_config(folder / "model", "qwen3_moe", **SMALL)
    return model, write_adapters(folder / "adapters", model)


@pytest.fixture(scope="module")
def engines(world):
    made = {}

    def get(backend, mode, **options):
        key = (backend, mode, *sorted(options.items()))
        if key not in made:
            made[key] = make_engine(*world, mode=mode, backend=backend, max_tokens=16384, buckets=BUCKETS, **options)
        return made[key]

    return get


def replay_and_padded(engine, requests):
    """The scores by replay, and by the eager run of the same padded batches."""
    replayed = engine.score(requests)
    runner = engine._runner
    original = runner.run

    def padded(batch):
        return BodyOutput(hidden_TH=runner.run_padded(batch), mode=RunMode.EAGER, admission=runner.admit(batch))

    runner.run = padded
    try:
        return replayed, engine.score(requests)
    finally:
        runner.run = original


def assert_replays(engine, requests, mode):
    replayed, padded = replay_and_padded(engine, requests)
    assert {r.mode for r in replayed} == {RunMode(str(mode))}
    assert all(r.error is None for r in replayed)
    assert values(replayed) == values(padded)
    return replayed


def graph_passes(engine, mode):
    return sum(p["count"] for p in engine.report()["passes"] if p["mode"] == str(mode))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_64_mixed_requests_equal_their_padded_eager_run_bit_for_bit(engines, backend, mode):
    engine = engines(backend, mode)
    requests = mixed_requests(engine, 64, 400)
    first = assert_replays(engine, requests, mode)
    before = graph_passes(engine, mode)
    assert values(engine.score(requests)) == values(first)
    once = graph_passes(engine, mode) - before
    assert values(engine.score(requests)) == values(first)
    assert graph_passes(engine, mode) - before == 2 * once > 0, "both prefills of the pair are graph passes"
    assert len({round(r.logprob_sum / max(r.num_tokens, 2), 2) for r in first}) > 8, "scores hardly differ"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 33, 64, 65, 257, 1000])
def test_request_counts_replay_as_capacity_says(engines, backend, mode, count):
    engine = engines(backend, mode)
    requests = mixed_requests(engine, count, 12, shortest=8)
    results = engine.score(requests)
    limit = engine._capacity.request_slots(mode)
    assert limit >= 1000, "the capacity of this run was meant to hold them all"
    assert {r.mode for r in results} == {RunMode(str(mode))}
    few = engines(backend, GraphMode.FULL, max_requests=64) if mode is GraphMode.FULL else None
    if few is not None:
        over = few.score(requests)
        assert few._capacity.request_slots(mode) == 64
        assert {r.mode for r in over} == {RunMode.FULL}, "more requests than slots make more batches, not eager ones"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_large_small_all_base_one_token_other_adapters_large_again(engines, backend, mode):
    engine = engines(backend, mode)
    large = mixed_requests(engine, 40, 200, seed=1)
    small = mixed_requests(engine, 3, 20, seed=2, shortest=14)
    base = [Request(token_ids=r.token_ids) for r in mixed_requests(engine, 5, 60, seed=3, shortest=40)]
    one = [Request(token_ids=[7], adapter="a3")]
    others = [Request(token_ids=r.token_ids, adapter=f"a{i % 2 + 5}") for i, r in enumerate(large)]
    first = None
    for batch in (large, small, base, one, others, large):
        results = assert_replays(engine, batch, mode)
        if batch is large:
            assert first is None or values(results) == first
            first = values(results)


@pytest.mark.parametrize("mode", MODES)
def test_rows_stay_within_the_spread_of_bf16_of_their_solo_runs(engines, mode):
    engine = engines("triton", mode)
    requests = mixed_requests(engine, 24, 100, seed=5)
    together = engine.score(requests)
    worst = 0.0
    for request, result in zip(requests, together, strict=True):
        (alone,) = engine.score([request])
        pairs = zip(result.token_logprobs[1:], alone.token_logprobs[1:], strict=True)
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    print(f"largest difference of any token's log-probability, batch against solo, bf16: {worst:.4f}")
    assert worst < 0.15


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_adapters_loaded_replaced_and_dropped_after_capture(world, engines, backend, mode, tmp_path):
    engine = engines(backend, mode, slots=2)
    prompt = list(range(1, 60))
    expected = {}
    for name in ("a0", "a7", "a3", "a0", "a7"):
        (result,) = assert_replays(engine, [Request(token_ids=prompt, adapter=name)], mode)
        assert expected.setdefault(name, result.token_logprobs) == result.token_logprobs
    assert len({tuple(v[1:]) for v in expected.values()}) == 3
    catalogue = build_catalogue(engine._base.causal_lm)
    write_adapter(tmp_path / "large", catalogue, 128, 3, suffixes=("q_proj",))
    from moelora.adapters.loader import load_adapter

    large = load_adapter(tmp_path / "large", name="large", catalogue=catalogue, dtype=torch.bfloat16)
    with pytest.raises(AdapterError, match="rank 128"):
        engine._bank.load(0, large)
    (again,) = engine.score([Request(token_ids=prompt, adapter="a7")])
    assert again.token_logprobs == expected["a7"]
    engine._bank.clear(engine._bank.residents.index("a7"))
    (reloaded,) = engine.score([Request(token_ids=prompt, adapter="a7")])
    assert reloaded.token_logprobs == expected["a7"]


@torch.inference_mode()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_poison_in_free_memory_padding_and_unused_slots_changes_nothing(world, backend, mode):
    engine = make_engine(
        world[0],
        dict(list(world[1].items())[:3]),
        mode=mode,
        backend=backend,
        max_tokens=1024,
        slots=3,
        buckets=(64, 1024),
    )
    requests = mixed_requests(engine, 6, 150, seed=8, shortest=100)
    clean = values(engine.score(requests))
    # Every slot that no row uses, then all free memory of the allocator.
    unused = engine._bank.residents.index("a2")
    for slots in engine._bank.slots.values():
        a, b = (slots.a_LERI, slots.b_LEOR) if hasattr(slots, "a_LERI") else (slots.a_LRI, slots.b_LOR)
        a[unused].fill_(float("nan"))
        b[unused].fill_(float("nan"))
    engine._bank._residents[unused].name = None
    some = [r for r in requests if r.adapter != "a2"]
    kept = [v for v, r in zip(clean, requests) if r.adapter != "a2"]
    poison = [torch.full((1 << 26,), float("nan"), device="cuda") for _ in range(40)]
    del poison
    runner = engine._runner
    for graph in runner._graphs.values():
        graph._hidden_TH.fill_(float("nan"))
    assert values(engine.score(some))[0] == kept[0]
    got = engine.score(some)
    assert all(r.error is None for r in got)
    for result, (logprobs, _) in zip(got, kept, strict=True):
        pairs = zip(result.token_logprobs[1:], logprobs[1:], strict=True)
        assert max((abs(a - b) for a, b in pairs), default=0) < 0.15


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [50, 63, 64, 65, 8192, 16384, 16385])
def test_bucket_edges(engines, backend, mode, tokens):
    engine = engines(backend, mode)
    requests = [Request(token_ids=[(5 * i + 1) % 4096 for i in range(tokens)], adapter="a4")]
    if tokens > 16384:
        (result,) = engine.score(requests)
        assert result.mode is RunMode.EAGER
        assert engine.report()["eager_reasons"]["tokens_over_largest_bucket"] >= 1
        return
    assert_replays(engine, requests, mode)


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "qwen3", "gpt_oss", "glm4_moe"]
)
@pytest.mark.parametrize("mode", MODES)
def test_architectures_capture_and_equal_eager(model_type, mode, tmp_path):
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = {**CONFIGS[model_type], **sizes, "pad_token_id": 0, "max_position_embeddings": 4096}
    model = write_config(tmp_path / "model", model_type, **config)
    adapters = write_adapters(
        tmp_path / "adapters", model, (4, 16), suffixes=("o_proj", "gate_up_proj", "down_proj", "gate")
    )
    engine = make_engine(model, adapters, mode=mode, max_tokens=512, buckets=(32, 512))
    assert engine.report()["graphs"]["mode"] == str(mode), engine.report()["graphs"]
    assert_replays(engine, mixed_requests(engine, 9, 60, shortest=50), mode)


@pytest.mark.parametrize("mode", MODES)
def test_graphs_can_be_captured_anew(world, mode):
    engine = make_engine(*world, mode=mode, backend="triton", max_tokens=512, buckets=(64, 512))
    requests = mixed_requests(engine, 6, 300, seed=4)
    before = values(engine.score(requests))
    for _ in range(2):
        engine._runner.capture()
        assert values(engine.score(requests)) == before


def test_a_capture_that_breaks_off_leaves_the_process_as_it_was():
    """In CUDA's own words: the memory of the capture is free again, random numbers flow, and others can capture."""
    device = torch.device("cuda")
    x = torch.ones(1 << 24, device=device)
    recorder = CudaRecorder(device)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()

    def synchronises():
        (x * 2).sum().item()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            recorder.record(synchronises)
        assert torch.rand(4, device=device).std() > 0
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < reserved + x.nbytes
    doubled = recorder.record(lambda: x.mul_(2))
    doubled.replay()
    assert x.unique().tolist() == [2.0]


def test_graphs_that_are_garbage_do_not_break_a_capture_off():
    """CUDA forbids a thread that captures to destroy graphs, and the collector comes when it likes."""
    device = torch.device("cuda")
    x = torch.ones(64, device=device)
    recorder = CudaRecorder(device)
    cycle = [recorder.record(lambda: x.add_(1))]
    cycle.append(cycle)
    del cycle
    kept = []

    def work():
        x.mul_(2)
        kept.extend([] for _ in range(10_000))  # of which the collector takes notice

    recorder.record(work).replay()
    assert x.unique().tolist() == [2.0]
    assert gc.isenabled()


def seconds(work, runs=7):
    for _ in range(2):
        work()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[runs // 2]


@pytest.mark.large
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_replay_beats_eager_on_a_30b_a3b_body(tmp_path, backend, mode):
    from moelora.batching.packing import pack
    from moelora.batching.sequences import Sequence
    from moelora.capacity import EagerReason
    from moelora.graphs.eager import EagerRunner
    from moelora.types import Phase

    layers = 12
    model = write_config(tmp_path / "model", "qwen3_moe", **QWEN3_30B_A3B, num_hidden_layers=layers)
    (one,) = write_adapters(tmp_path / "adapters", model, (16,)).values()
    adapters = {f"a{i}": one for i in range(8)}
    engine = make_engine(
        model, adapters, mode=mode, backend=backend, max_tokens=2048, slots=8, buckets=(128, 512, 2048)
    )
    engine.score([Request(token_ids=[1], adapter=name) for name in engine.adapter_names])
    slot_of = {name: slot for slot, name in enumerate(engine._bank.residents)}
    assert set(slot_of) == set(adapters), "all are resident"
    eager = EagerRunner(engine._base, engine._backend, Phase.PREFILL, EagerReason.GRAPH_OFF)
    names = [*engine.adapter_names, "__base__"]
    for tokens, at_least in ((128, 3.0), (512, 2.0), (2048, 0.9)):
        sequences = [
            Sequence(request=i, adapter=names[i % 9], token_ids=(i,) * (tokens // 16), runs=(), top_k=0)
            for i in range(16)
        ]
        batch = pack(sequences, slot_of, torch.device("cuda"))
        with torch.inference_mode():
            graph_s, eager_s = seconds(partial(engine._runner.run, batch)), seconds(partial(eager.run, batch))
        shown = f"graph {graph_s * 1e3:.2f} ms, eager {eager_s * 1e3:.2f} ms"
        print(f"{backend} {mode} {tokens} tokens, {layers} layers: {shown}")
        if mode is GraphMode.FULL:
            assert eager_s / graph_s >= at_least
