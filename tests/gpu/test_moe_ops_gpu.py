"""The experts' kernels, the scoring head and the attention at real shapes. Needs a CUDA device."""

import pytest
import torch

from moelora.backends.base import DenseSlots, ExpertSlots, ExpertsWeights, MoeShape
from moelora.capacity import PrefillCapacity
from moelora.types import Phase
from moelora_kernels.ops.attention import attention_tiles, pick_attention_config, varlen_attention
from moelora_kernels.ops.attention.naive import naive_attention
from moelora_kernels.ops.experts import MoeBuffers, experts_lora
from moelora_kernels.ops.experts.naive import naive_activation, naive_experts
from moelora_kernels.ops.score_head import score_rows
from moelora_kernels.ops.score_head.naive import naive_scores
from moelora_kernels.ops.top_k import naive_top_k_softmax, top_k_softmax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLAIN = {"activation_name": "silu", "gated": True, "interleaved": False, "transposed": False}
GPT_OSS = {"activation_name": "gpt_oss", "gated": True, "interleaved": True, "transposed": True}
SHAPES = {
    "qwen3_30b": (128, 8, 2048, 768, PLAIN),
    "qwen3_5_35b": (256, 8, 2048, 512, PLAIN),
    "mixtral_8x7b": (8, 2, 4096, 14336, PLAIN),
    "gpt_oss_20b": (32, 4, 2880, 2880, GPT_OSS),
}
RANKS = [16, 3, 8, 16, 0, 1, 16, 12]
"""Ranks of eight slots whose bank is 16 wide."""


def randn(*shape, dtype=torch.bfloat16, scale=1.0):
    return torch.randn(*shape, device="cuda", dtype=dtype).mul_(scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("E", "k"), [(8, 2), (32, 4), (60, 4), (128, 8), (512, 10)])
def test_a_router_s_row_has_the_same_bits_in_any_batch(E, k, dtype):
    logits = 3 * randn(16384, E, dtype=dtype)
    for wanted in (dtype, torch.float32):
        values, indices = top_k_softmax(logits, k, normed=True, dtype=wanted)
        expected, order = naive_top_k_softmax(logits, k, normed=True, dtype=wanted)
        assert torch.equal(indices, order)
        torch.testing.assert_close(values, expected, rtol=1e-2 if wanted is torch.bfloat16 else 1e-6, atol=1e-12)
        for rows in (1, 2, 7, 63, 300, 1056, 5000):
            for begin in (0, 1, 130):
                some = slice(begin, begin + rows)
                again, chosen = top_k_softmax(logits[some], k, normed=True, dtype=wanted)
                assert torch.equal(again, values[some])
                assert torch.equal(chosen, indices[some])


def make_base(E, H, width, kind, dtype):
    up_shape, down_shape = ((H, 2 * width), (width, H)) if kind["transposed"] else ((2 * width, H), (H, width))
    biased = kind["activation_name"] == "gpt_oss"
    fields = {
        "up": randn(E, *up_shape, dtype=dtype, scale=H**-0.5),
        "down": randn(E, *down_shape, dtype=dtype, scale=width**-0.5),
        "up_bias": randn(E, 2 * width, dtype=dtype) if biased else None,
        "down_bias": randn(E, H, dtype=dtype) if biased else None,
        "activation": lambda x: naive_activation(base, x),
        "limit": 7.0 if biased else None,
        "alpha": 1.702 if biased else None,
        **kind,
    }
    base = ExpertsWeights(**fields)
    return base


def make_slots(ranks, E, R, in_, out, dtype):
    a = randn(len(ranks), E, R, in_, dtype=dtype, scale=in_**-0.5)
    b = randn(len(ranks), E, out, R, dtype=dtype, scale=0.3)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:] = 0
        b[slot, :, :, rank:] = 0
    return ExpertSlots(a_LERI=a, b_LEOR=b, ranks_L=torch.tensor(ranks, dtype=torch.int32, device="cuda"))


def make_buffers(T, E, K, H, width, dtype, slots=8, R=16):
    shape = MoeShape(num_experts=E, top_k=K, hidden=H, up_out=2 * width, inter=width, max_rank_up=R, max_rank_down=R)
    capacity = PrefillCapacity(max_tokens=T, max_requests=T, full_max_requests=64, slots=slots, max_rank=R)
    buffers = MoeBuffers(Phase.PREFILL, capacity, torch.device("cuda"), dtype, [shape])
    poison(buffers)
    return buffers


def poison(buffers):
    for name in ("h", "pairs", "y", "wide"):
        getattr(buffers, name).fill_(float("nan"))


def make_batch(T, E, K, H, dtype, slots=8):
    weights, ids = torch.rand(T, E, device="cuda").topk(K, -1)
    slot = torch.randint(-1, slots, (T,), device="cuda", dtype=torch.int32)
    return randn(T, H, dtype=dtype), ids, weights / weights.sum(-1, keepdim=True), slot


def distance(out, expected):
    assert torch.isfinite(out).all()
    return ((out.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.large
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1, 37, 512, 4096])
def test_experts_at_real_shapes(name, tokens):
    torch.manual_seed(0)
    E, K, H, width, kind = SHAPES[name]
    dtype = torch.bfloat16
    base = make_base(E, H, width, kind, dtype)
    up = make_slots(RANKS, E, 16, H, 2 * width, dtype)
    down = make_slots(RANKS, E, 16, width, H, dtype)
    buffers = make_buffers(max(tokens, 64), E, K, H, width, dtype)
    x, ids, weights, slot = make_batch(tokens, E, K, H, dtype)
    out = experts_lora(x, ids, weights, base, up, down, slot, buffers=buffers, has_lora=True)
    expected = naive_experts(x, ids, weights, base, up, down, slot, dtype=torch.float32)
    assert distance(out, expected) < 8e-3
    row = tokens // 2
    alone = experts_lora(
        *(t[row : row + 1] for t in (x, ids, weights)),
        base,
        up,
        down,
        slot[row : row + 1],
        buffers=buffers,
        has_lora=True,
    )
    assert torch.equal(alone[0], out[row])
    plain = experts_lora(x, ids, weights, base, up, down, slot, buffers=buffers, has_lora=False)
    assert torch.equal(plain[slot == -1], out[slot == -1])


@pytest.mark.parametrize("name", ["qwen3_30b", "gpt_oss_20b"])
def test_experts_in_float32(name):
    torch.manual_seed(0)
    E, K, H, width, kind = SHAPES[name]
    dtype, tokens = torch.float32, 200
    base = make_base(E, H, width, kind, dtype)
    up = make_slots(RANKS, E, 16, H, 2 * width, dtype)
    down = make_slots(RANKS, E, 16, width, H, dtype)
    buffers = make_buffers(tokens, E, K, H, width, dtype)
    x, ids, weights, slot = make_batch(tokens, E, K, H, dtype)
    out = experts_lora(x, ids, weights, base, up, down, slot, buffers=buffers, has_lora=True)
    assert distance(out, naive_experts(x, ids, weights, base, up, down, slot, dtype=torch.float64)) < 2e-6
    alone = experts_lora(
        *(t[7:8] for t in (x, ids, weights)), base, up, down, slot[7:8], buffers=buffers, has_lora=True
    )
    assert torch.equal(alone[0], out[7])


def test_experts_replay_equals_eager_and_sees_nothing_of_an_earlier_batch():
    torch.manual_seed(0)
    E, K, H, width, kind = SHAPES["qwen3_30b"]
    dtype, T = torch.bfloat16, 512
    base = make_base(E, H, width, kind, dtype)
    up, down = make_slots(RANKS, E, 16, H, 2 * width, dtype), make_slots(RANKS, E, 16, width, H, dtype)
    buffers = make_buffers(T, E, K, H, width, dtype)
    static = make_batch(T, E, K, H, dtype)
    live = torch.tensor([T], dtype=torch.int32, device="cuda")

    def run(x, ids, weights, slot):
        return experts_lora(x, ids, weights, base, up, down, slot, buffers=buffers, has_lora=True, num_live=live)

    static[3].fill_(-1)
    run(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*static)
    for count in (512, 5, 300, 1):
        batch = make_batch(T, E, K, H, dtype)
        for to, given in zip(static, batch, strict=True):
            to.copy_(given)
        live.fill_(count)
        poison(buffers)
        graph.replay()
        replayed = out.clone()
        poison(buffers)
        assert torch.equal(replayed, run(*batch))
        assert (replayed[count:] == 0).all()
        exact = experts_lora(
            *(t[:count] for t in batch[:3]), base, up, down, batch[3][:count], buffers=buffers, has_lora=True
        )
        assert torch.equal(exact, replayed[:count])


@pytest.mark.large
def test_offsets_beyond_32_bits_in_pairs():
    torch.manual_seed(0)
    E, K, H, width, kind = SHAPES["qwen3_30b"]
    dtype, T = torch.bfloat16, 131_200
    assert T * K * H > 2**31
    base = make_base(E, H, width, kind, dtype)
    up, down = make_slots(RANKS, E, 16, H, 2 * width, dtype), make_slots(RANKS, E, 16, width, H, dtype)
    buffers = make_buffers(T, E, K, H, width, dtype)
    x, ids, weights, slot = make_batch(T, E, K, H, dtype)
    out = experts_lora(x, ids, weights, base, up, down, slot, buffers=buffers, has_lora=True)
    for part in (slice(0, 64), slice(T - 64, T)):
        few = experts_lora(
            x[part], ids[part], weights[part], base, up, down, slot[part], buffers=buffers, has_lora=True
        )
        assert torch.equal(few, out[part])
    assert torch.isfinite(out).all()


@pytest.mark.large
def test_offsets_beyond_32_bits_in_weights():
    torch.manual_seed(0)
    E, K, H, width, dtype = 256, 2, 4096, 1040, torch.bfloat16
    assert (E - 1) * 2 * width * H > 2**31
    base = make_base(E, H, width, PLAIN, dtype)
    up, down = make_slots([16, 4], E, 16, H, 2 * width, dtype), make_slots([16, 4], E, 16, width, H, dtype)
    buffers = make_buffers(64, E, K, H, width, dtype, slots=2)
    x, ids, weights, slot = make_batch(64, E, K, H, dtype, slots=2)
    ids = ids.clamp(min=E - 2)
    out = experts_lora(x, ids, weights, base, up, down, slot, buffers=buffers, has_lora=True)
    assert distance(out, naive_experts(x, ids, weights, base, up, down, slot, dtype=torch.float32)) < 8e-3


@pytest.mark.large
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_score_head_at_a_real_vocabulary(dtype):
    torch.manual_seed(0)
    V, H, N = 151_936, 2048, 300
    x, w = randn(N, H, dtype=dtype), randn(V, H, dtype=dtype, scale=H**-0.5)
    slots = DenseSlots(
        a_LRI=randn(3, 16, H, dtype=dtype, scale=H**-0.5),
        b_LOR=randn(3, V, 16, dtype=dtype, scale=0.2),
        ranks_L=torch.tensor([16, 16, 16], dtype=torch.int32, device="cuda"),
    )
    targets = torch.randint(0, V, (N,), device="cuda")
    slot = torch.randint(-1, 3, (N,), device="cuda", dtype=torch.int32)
    scores = score_rows(x, w, targets, slots=slots, row_slot_N=slot, top_k=8)
    part = slice(100, 140)
    expected = naive_scores(x[part], w, targets[part], slots=slots, row_slot_N=slot[part], top_k=8)
    tolerance = 4e-2 if dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(scores.target_logprob[part].double(), expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(scores.lse[part].double(), expected[3], rtol=0, atol=tolerance / 10)
    torch.testing.assert_close(scores.top_logprobs[part].double(), expected[5], rtol=0, atol=tolerance)
    alone = score_rows(x[111:112], w, targets[111:112], slots=slots, row_slot_N=slot[111:112], top_k=8)
    assert torch.equal(alone.lse[0], scores.lse[111])
    assert torch.equal(alone.top_logprobs[0], scores.top_logprobs[111])


@pytest.mark.parametrize("case", ["gqa", "window", "sinks", "latent", "wide", "softcap", "float32"])
def test_attention_at_real_widths(case):
    torch.manual_seed(0)
    H, G, D, Dv = {"latent": (16, 16, 192, 128), "wide": (8, 2, 256, 256), "sinks": (16, 2, 64, 64)}.get(
        case, (8, 2, 128, 128)
    )
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    lengths, padding = [1, 700, 33, 129, 0, 1500], 37
    boundaries = torch.tensor([0, *lengths]).cumsum(0).tolist()
    T = boundaries[-1] + padding
    q, k, v = randn(T, H, D, dtype=dtype), randn(T, G, D, dtype=dtype), randn(T, G, Dv, dtype=dtype)
    cu = torch.tensor(boundaries, dtype=torch.int32, device="cuda")
    options = {"scale": D**-0.5, "window": 128 if case in ("window", "sinks") else None}
    options["sinks_H"] = torch.linspace(-2, 2, H, device="cuda") if case == "sinks" else None
    options["softcap"] = 20.0 if case == "softcap" else None
    expected = naive_attention(q, k, v, boundaries, **options)
    limit = 2e-6 if case == "float32" else 6e-3
    out = varlen_attention(q, k, v, cu, 1500, backend="triton", **options)
    assert distance(out, expected) < limit
    assert (out[boundaries[-1] :] == 0).all()
    assert torch.equal(out, varlen_attention(q, k, v, cu, 1500, backend="triton", **options))
    begin, end = boundaries[1], boundaries[2]
    own = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
    alone = varlen_attention(q[begin:end], k[begin:end], v[begin:end], own, 700, backend="triton", **options)
    assert torch.equal(alone, out[begin:end])
    if case in ("gqa", "window", "sinks"):
        other = varlen_attention(q, k, v, cu, 1500, backend="torch", **options)
        assert distance(other, expected) < limit
        assert (other[boundaries[-1] :] == 0).all()


def test_attention_tiles_of_a_padded_batch():
    cu = torch.tensor([0, 300, 300, 421, 421, 421], dtype=torch.int32, device="cuda")
    tiles = attention_tiles(cu, 512, pick_attention_config(torch.bfloat16, 128, 128, longest=4096))
    assert tiles.live_1.item() == 5
    assert tiles.first_M.tolist()[:5] == [0, 128, 256, 300, 421]
    assert tiles.begin_M.tolist() == [0, 0, 0, 300, -1] + [-1] * 5
    assert tiles.end_M.tolist()[:4] == [300, 300, 300, 421]
