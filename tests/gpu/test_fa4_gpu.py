"""FlashAttention 4 behind the attention function: right when ragged, in static slots, in graphs; chosen by time."""

from itertools import accumulate, pairwise

import pytest
import torch

from gpu.graph_world import SMALL, make_engine, mixed_requests, values, write_adapters, write_config
from gpu.test_graphs_gpu import assert_replays
from moelora import ConfigError, GraphMode
from moelora_kernels.ops.attention import flash4_refusal, varlen_attention
from moelora_kernels.ops.attention.naive import naive_attention


def _refusal() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return flash4_refusal(torch.device("cuda"), torch.bfloat16, 128, 128)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_refusal() is not None, reason=f"FlashAttention 4: {_refusal()}")]

HEADS = [(32, 4, 128, 128), (16, 16, 64, 64), (8, 1, 128, 128), (16, 2, 256, 256), (16, 16, 192, 128)]
OPTIONS = {
    "plain": {},
    "window": {"window": 128},
    "window of one": {"window": 1},
    "sinks": {"sinks_H": torch.linspace(-2, 2, 32)},
    "softcap": {"softcap": 30.0},
    "sinks and window": {"sinks_H": torch.linspace(-2, 2, 32), "window": 128},
}
LENGTHS = (700, 1, 2000, 17, 128, 129, 3, 5)


def make(rows, heads=HEADS[0], seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    H, G, D, Dv = heads
    return tuple(
        torch.randn(rows, n, d, generator=generator, device="cuda").to(torch.bfloat16)
        for n, d in ((H, D), (G, D), (G, Dv))
    )


def boundaries(lengths, slots=None):
    ends = [0, *accumulate(lengths)]
    return torch.tensor(ends + ends[-1:] * ((slots or len(lengths)) - len(lengths)), dtype=torch.int32, device="cuda")


def attend(q, k, v, cu, longest, backend="fa4", **options):
    return varlen_attention(q, k, v, cu, longest, scale=q.shape[2] ** -0.5, backend=backend, **options)


def assert_close(got, q, k, v, ends, **options):
    """Within what 16 bits allow of float64: all values together, and each row of each head."""
    want = naive_attention(q, k, v, ends, scale=q.shape[2] ** -0.5, **options)
    live = ends[-1]
    off = (got.double() - want)[:live]
    assert float(off.norm() / want.norm()) < 8e-3
    assert float((off.norm(dim=2) / want[:live].norm(dim=2).clamp(min=1e-12)).max()) < 6e-2
    assert not got[live:].any()


@pytest.mark.parametrize("heads", HEADS)
def test_ragged_batches_equal_naive_attention(heads):
    q, k, v = make(sum(LENGTHS), heads)
    cu = boundaries(LENGTHS)
    assert_close(attend(q, k, v, cu, max(LENGTHS)), q, k, v, cu.tolist())


@pytest.mark.parametrize("name", OPTIONS)
def test_windows_sinks_and_soft_caps(name):
    q, k, v = make(sum(LENGTHS), seed=1)
    options = {key: x.cuda().bfloat16() if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()}
    cu = boundaries(LENGTHS)
    assert_close(attend(q, k, v, cu, max(LENGTHS), **options), q, k, v, cu.tolist(), **options)


@pytest.mark.parametrize("slots", [len(LENGTHS), 64, 300, 1024])
def test_static_slots_and_padding_give_the_bits_of_exact_boundaries(slots):
    q, k, v = make(4096, seed=2)
    live = sum(LENGTHS)
    exact = attend(q[:live], k[:live], v[:live], boundaries(LENGTHS), max(LENGTHS))
    for x in (q, k, v):
        x[live:] = float("nan")
    poison = torch.full((1 << 26,), float("nan"), device="cuda")
    del poison
    padded = attend(q, k, v, boundaries(LENGTHS, slots), 4096)
    assert torch.equal(padded[:live], exact)
    assert not padded[live:].any()


def test_what_a_request_holds_changes_no_other():
    q, k, v = make(sum(LENGTHS), seed=3)
    cu = boundaries(LENGTHS)
    before = attend(q, k, v, cu, max(LENGTHS))
    ends = cu.tolist()
    for i in range(len(LENGTHS)):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[ends[i] : ends[i + 1]] = float("nan") if i % 2 else 3.0
        after = attend(*changed, cu, max(LENGTHS))
        others = [row for j in range(len(LENGTHS)) if j != i for row in range(ends[j], ends[j + 1])]
        assert torch.equal(after[others], before[others]), i
        if i % 2:
            assert after[ends[i] : ends[i + 1]].isnan().all()


def test_a_graph_replays_the_bits_of_eager_calls():
    bucket, slots = 4096, 512
    q, k, v = make(bucket, seed=4)
    cu = boundaries(LENGTHS, slots)
    static = [x.clone() for x in (q, k, v, cu)]
    for _ in range(2):
        attend(*static, bucket)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*static, bucket)
    batches = [LENGTHS, (4096,), (1,) * 512, (9, 2500), (1,), (64,) * 64, LENGTHS]
    for seed, lengths in enumerate(batches):
        fresh = make(bucket, seed=seed)
        for x, now in zip(static, (*fresh, boundaries(lengths, slots)), strict=True):
            x.copy_(now)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, attend(*static, bucket)), lengths
        assert_close(replayed, *fresh, boundaries(lengths).tolist())


def test_many_tiny_requests():
    lengths = tuple(1 + i * i % 5 for i in range(1500))
    q, k, v = make(sum(lengths), seed=5)
    cu = boundaries(lengths)
    assert_close(attend(q, k, v, cu, max(lengths)), q, k, v, cu.tolist())


def test_bits_of_a_row_alone_and_among_others():
    """Not promised, so that batch-invariant runs do not use it; told here, for whoever would change that."""
    q, k, v = make(sum(LENGTHS), seed=6)
    ends = boundaries(LENGTHS).tolist()
    together = attend(q, k, v, boundaries(LENGTHS), max(LENGTHS))
    equal = 0
    for a, b in pairwise(ends):
        alone = attend(q[a:b], k[a:b], v[a:b], boundaries([b - a]), b - a)
        equal += torch.equal(alone, together[a:b])
        assert float((alone - together[a:b]).norm() / alone.norm()) < 8e-3
    print(f"{equal} of {len(LENGTHS)} requests have the same bits alone and among others")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fa4")
    model = write_config(folder / "model", "qwen3_moe", **{**SMALL, "head_dim": 128})
    return model, write_adapters(folder / "adapters", model)


def engine_of(world, mode, **options):
    return make_engine(*world, mode=mode, buckets=(512, 2048, 4096, 8192), **options)


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.BREAKABLE])
def test_an_engine_replays_its_padded_eager_run_bit_for_bit(world, mode):
    engine = engine_of(world, mode, attention="fa4")
    requests = mixed_requests(engine, 64, 400)
    results = assert_replays(engine, requests, mode)
    ours = engine_of(world, mode, attention="triton").score(requests)
    assert values(results) != values(ours), "another kernel ran"
    for one, other in zip(results, ours, strict=True):
        pairs = zip(one.token_logprobs[1:], other.token_logprobs[1:], strict=True)
        assert max((abs(a - b) for a, b in pairs), default=0) < 0.15
    assert values(engine.score(requests)) == values(results)


def test_the_kernel_is_chosen_by_time_and_can_be_taken_over(world):
    engine = engine_of(world, GraphMode.FULL)
    (entry,) = engine.report()["attention"]
    print(entry)
    assert entry["fa4_unused_because"] in (None, "it was not faster")
    assert {(one["graph"], one["length"]) for one in entry["times"]} >= {(False, 8192), (True, 8192)}
    assert all(one["triton_ms"] > 0 and one["fa4_ms"] > 0 for one in entry["times"])
    requests = mixed_requests(engine, 8, 3000, seed=2)
    for chosen, attention in ((None, "triton"), (1, "fa4")):
        engine.attention_choice = {name: {"requests": chosen, "buckets": chosen} for name in engine.attention_choice}
        results = engine.score(requests)
        assert values(results) == values(engine_of(world, GraphMode.FULL, attention=attention).score(requests))


def test_batch_invariant_runs_do_not_use_it(world):
    engine = engine_of(world, GraphMode.FULL, batch_invariant=True)
    (entry,) = engine.report()["attention"]
    assert "in any batch" in entry["fa4_unused_because"]
    assert entry["fa4_from_bucket"] is entry["fa4_from_request_tokens"] is None
    with pytest.raises(ConfigError, match="not batch-invariant"):
        engine_of(world, GraphMode.OFF, batch_invariant=True, attention="fa4")
