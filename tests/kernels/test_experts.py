"""The routed experts: equal to plain torch for every layout, and the same bits for a row wherever it stands."""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase as HypothesisPhase
from hypothesis import given, settings
from hypothesis import strategies as st

from moelora.backends.base import ExpertSlots, ExpertsWeights, MoeShape, PhaseError
from moelora.capacity import PrefillCapacity
from moelora.errors import ConfigError
from moelora.types import Phase
from moelora_kernels.ops.experts import MoeBuffers, MoeConfig, ProductConfig, experts_lora
from moelora_kernels.ops.experts.config import default_config
from moelora_kernels.ops.experts.naive import naive_activation, naive_experts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = settings(max_examples=14, deadline=None, derandomize=True, phases=[HypothesisPhase.generate])
SMALL = MoeConfig(
    block_m=16,
    up=ProductConfig(block_n=32, block_k=32, warps=4, stages=2, group=2),
    down=ProductConfig(block_n=16, block_k=16, warps=4, stages=2),
    shrink=ProductConfig(block_n=32, block_k=32, warps=4, stages=2),
)


def randn(*shape, seed, dtype, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to(dtype).to(DEVICE)


def make_base(
    E, H, width, *, act="silu", gated=True, interleaved=False, transposed=False, bias=False, dtype, seed=0, **more
):
    up_out = 2 * width if gated else width
    up = randn(E, up_out, H, seed=seed, dtype=dtype, scale=H**-0.5)
    down = randn(E, H, width, seed=seed + 1, dtype=dtype, scale=width**-0.5)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()

    def activation(x):
        return naive_activation(named, x)

    fields = {
        "up": up,
        "down": down,
        "up_bias": randn(E, up_out, seed=seed + 2, dtype=dtype) if bias else None,
        "down_bias": randn(E, H, seed=seed + 3, dtype=dtype) if bias else None,
        "transposed": transposed,
        "gated": gated,
        "interleaved": interleaved,
        "activation": activation,
        **more,
    }
    named = ExpertsWeights(activation_name=act or "silu", **fields)
    return ExpertsWeights(activation_name=act, **fields)


def make_slots(ranks, E, R, in_, out, *, dtype, seed, shared_a=False, shared_b=False):
    L = len(ranks)
    a = randn(L, 1 if shared_a else E, R, in_, seed=seed, dtype=dtype, scale=in_**-0.5)
    b = randn(L, 1 if shared_b else E, out, R, seed=seed + 1, dtype=dtype)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:] = 0
        b[slot, :, :, rank:] = 0
    return ExpertSlots(a_LERI=a, b_LEOR=b, ranks_L=torch.tensor(ranks, dtype=torch.int32, device=DEVICE))


def make_batch(T, K, E, L, H, *, dtype, seed, holes=False):
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(T, E, generator=g).argsort(1)[:, :K]
    if holes:
        ids_TK[torch.rand(T, K, generator=g) < 0.2] = E + 3
    weights_TK = torch.rand(T, K, generator=g)
    slot_T = torch.randint(-1, L, (T,), generator=g, dtype=torch.int32)
    x_TH = randn(T, H, seed=seed + 1, dtype=dtype)
    return x_TH, ids_TK.to(DEVICE), weights_TK.to(DEVICE), slot_T.to(DEVICE)


def make_buffers(T, K, E, L, H, base, R, dtype, phase=Phase.PREFILL, block_m=16):
    inter = base.down.shape[1] if base.transposed else base.down.shape[2]
    shape = MoeShape(num_experts=E, top_k=K, hidden=H, up_out=2 * inter, inter=inter, max_rank_up=R, max_rank_down=R)
    capacity = PrefillCapacity(max_tokens=T, max_requests=T, full_max_requests=T, slots=L, max_rank=R)
    return MoeBuffers(phase, capacity, DEVICE, dtype, [shape], block_m=block_m)


def poison(buffers):
    for name in ("h", "pairs", "y", "wide"):
        getattr(buffers, name).fill_(float("nan"))


def run(batch, base, up, down, buffers, *, has_lora=True, live=None, config=SMALL):
    x_TH, ids_TK, weights_TK, slot_T = batch
    T, K = ids_TK.shape
    poison(buffers)
    guarded = torch.full((T + 2, x_TH.shape[1]), float("nan"), dtype=x_TH.dtype, device=DEVICE)
    num_live = None if live is None else torch.tensor([live], dtype=torch.int32, device=DEVICE)
    out_TH = experts_lora(
        x_TH,
        ids_TK,
        weights_TK,
        base,
        up,
        down,
        slot_T,
        buffers=buffers,
        has_lora=has_lora,
        num_live=num_live,
        config=config,
        out=guarded[1:-1],
    )
    assert guarded[0].isnan().all()
    assert guarded[-1].isnan().all()
    width = base.down.shape[1] if base.transposed else base.down.shape[2]
    if base.activation_name is not None:
        assert buffers.h[T * K * width :].isnan().all()
    assert buffers.pairs[T * K * x_TH.shape[1] :].isnan().all()
    return out_TH


def error(out, expected):
    assert torch.isfinite(out).all()
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@FEW
@given(
    T=st.integers(1, 40),
    K=st.integers(1, 3),
    E=st.sampled_from([1, 3, 5]),
    ranks=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    H=st.sampled_from([32, 36]),
    width=st.sampled_from([16, 20]),
    shared=st.sampled_from([(False, False), (True, False), (False, True), (True, True)]),
    only=st.sampled_from(["both", "up", "down"]),
    live=st.floats(0.5, 1),
    seed=st.integers(0, 99),
)
def test_equals_plain_torch(T, K, E, ranks, H, width, shared, only, live, seed):
    K, L, R = min(K, E), len(ranks), max(1, *ranks)
    dtype = torch.float32
    base = make_base(E, H, width, dtype=dtype, seed=seed)
    kinds = {"dtype": dtype, "shared_a": shared[0], "shared_b": shared[1]}
    up = make_slots(ranks, E, R, H, 2 * width, seed=seed + 7, **kinds) if only != "down" else None
    down = make_slots(ranks, E, R, width, H, seed=seed + 9, **kinds) if only != "up" else None
    batch = make_batch(T, K, E, L, H, dtype=dtype, seed=seed, holes=True)
    buffers = make_buffers(T + 5, K, E, L, H, base, R, dtype)
    live = max(1, round(live * T))
    out_TH = run(batch, base, up, down, buffers, live=live)
    expected = naive_experts(*batch[:3], base, up, down, batch[3], num_live=live)
    assert error(out_TH, expected) < 2e-6
    assert (out_TH[live:] == 0).all()


KINDS = {
    "gelu": {"act": "gelu"},
    "gelu_tanh": {"act": "gelu_tanh"},
    "relu2_non_gated": {"act": "relu2", "gated": False},
    "silu_non_gated": {"act": "silu", "gated": False},
    "silu_interleaved": {"interleaved": True},
    "silu_bias": {"bias": True},
    "gpt_oss": {"act": "gpt_oss", "interleaved": True, "transposed": True, "bias": True, "limit": 0.5, "alpha": 1.3},
    "transposed_concatenated": {"transposed": True},
    "by_callable": {"act": None},
    "post_norm": {"post_norm": lambda x: x / x.square().mean(-1, keepdim=True).sqrt()},
}


@pytest.mark.parametrize("width", [24, 20])  # 20: no product has a multiple of 16 columns
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_experts(kind, width):
    E, H, L, R, dtype = 3, width + 8, 2, 5, torch.float32
    base = make_base(E, H, width, dtype=dtype, **KINDS[kind])
    up_out = 2 * width if base.gated else width
    up = make_slots([5, 2], E, R, H, up_out, dtype=dtype, seed=5)
    down = make_slots([3, 5], E, R, width, H, dtype=dtype, seed=6)
    batch = make_batch(21, 2, E, L, H, dtype=dtype, seed=3)
    buffers = make_buffers(23, 2, E, L, H, base, R, dtype)
    out_TH = run(batch, base, up, down, buffers)
    assert error(out_TH, naive_experts(*batch[:3], base, up, down, batch[3])) < 2e-6


@pytest.mark.parametrize("rank", [16, 32, 80, 256])
def test_mixed_ranks(rank):
    E, H, width, dtype = 2, 32, 16, torch.float32
    base = make_base(E, H, width, dtype=dtype)
    ranks = [rank, 1, 0, min(rank, 33)]
    up = make_slots(ranks, E, rank, H, 2 * width, dtype=dtype, seed=5)
    down = make_slots(ranks, E, rank, width, H, dtype=dtype, seed=6)
    batch = make_batch(40, 2, E, 4, H, dtype=dtype, seed=3)
    buffers = make_buffers(40, 2, E, 4, H, base, rank, dtype)
    out_TH = run(batch, base, up, down, buffers)
    assert error(out_TH, naive_experts(*batch[:3], base, up, down, batch[3])) < 2e-6


def test_sixteen_bits_are_close_to_exact():
    # Triton's interpreter multiplies the bit patterns of bfloat16 operands; float16 works there.
    E, H, width, dtype = 3, 64, 32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    base = make_base(E, H, width, dtype=dtype)
    up = make_slots([16, 8], E, 16, H, 2 * width, dtype=dtype, seed=5)
    down = make_slots([4, 16], E, 16, width, H, dtype=dtype, seed=6)
    batch = make_batch(40, 2, E, 2, H, dtype=dtype, seed=3)
    buffers = make_buffers(40, 2, E, 2, H, base, 16, dtype)
    out_TH = run(batch, base, up, down, buffers)
    assert error(out_TH, naive_experts(*batch[:3], base, up, down, batch[3])) < 8e-3


def small_case(rank=20, T=26, capacity=30):
    E, H, width, R, L, dtype = 3, 32, 16, rank, 5, torch.float32
    base = make_base(E, H, width, dtype=dtype)
    ranks = [rank, 3, 16, 1, 7]
    up = make_slots(ranks, E, R, H, 2 * width, dtype=dtype, seed=5)
    down = make_slots(ranks, E, R, width, H, dtype=dtype, seed=6)
    batch = make_batch(T, 2, E, L, H, dtype=dtype, seed=3)
    return batch, base, up, down, make_buffers(capacity, 2, E, L, H, base, R, dtype)


@pytest.mark.parametrize("rank", [16, 20])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_tile(rank):
    batch, base, up, down, buffers = small_case(rank)
    together = run(batch, base, up, down, buffers)
    for row in (0, 7, 25):
        alone = run(tuple(t[row : row + 1] for t in batch), base, up, down, buffers)
        assert torch.equal(alone[0], together[row])
    order = torch.randperm(26, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shuffled = run(tuple(t[order] for t in batch), base, up, down, buffers)
    assert torch.equal(shuffled, together[order])
    wide = replace(SMALL, block_m=32, up=replace(SMALL.up, block_n=64))
    assert torch.equal(run(batch, base, up, down, buffers, config=wide), together)


@pytest.mark.parametrize("rank", [16, 20])
def test_a_row_does_not_depend_on_the_slot_its_adapter_sits_in(rank):
    batch, base, up, down, buffers = small_case(rank)
    together = run(batch, base, up, down, buffers)
    order = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    moved = [ExpertSlots(a_LERI=s.a_LERI[order], b_LEOR=s.b_LEOR[order], ranks_L=s.ranks_L[order]) for s in (up, down)]
    x_TH, ids_TK, weights_TK, slot_T = batch
    place = torch.argsort(order).int()
    new_slot_T = torch.where(slot_T < 0, slot_T, place[slot_T.clamp(min=0).long()])
    assert torch.equal(run((x_TH, ids_TK, weights_TK, new_slot_T), base, *moved, buffers), together)


@pytest.mark.parametrize("rank", [16, 20])
def test_base_rows_have_the_bits_of_a_run_without_adapters(rank):
    batch, base, up, down, buffers = small_case(rank)
    mixed = run(batch, base, up, down, buffers)
    plain = run(batch, base, up, down, buffers, has_lora=False)
    rows = batch[3] == -1
    assert rows.any()
    assert torch.equal(mixed[rows], plain[rows])
    assert torch.equal(plain, run(batch, base, None, None, buffers))
    assert not torch.equal(mixed[~rows], plain[~rows])


def test_a_small_batch_after_a_large_one_in_the_same_buffers():
    batch, base, up, down, buffers = small_case()
    small = tuple(t[3:6] for t in batch)
    first = run(small, base, up, down, buffers)
    run(batch, base, up, down, buffers)
    assert torch.equal(run(small, base, up, down, buffers), first)
    all_base = (*small[:3], torch.full_like(small[3], -1))
    assert torch.equal(run(all_base, base, up, down, buffers), run(small, base, None, None, buffers))


def test_no_rows_and_rows_without_experts():
    batch, base, up, down, buffers = small_case()
    none = tuple(t[:0] for t in batch)
    assert experts_lora(*none[:3], base, up, down, none[3], buffers=buffers, has_lora=True).shape == (0, 32)
    nobody = (batch[0], torch.full_like(batch[1], -1), *batch[2:])
    assert (run(nobody, base, up, down, buffers) == 0).all()


def test_buffers_of_the_other_phase_are_refused():
    batch, base, up, down, buffers = small_case()
    with pytest.raises(PhaseError, match="phase prefill was handed to phase decode"):
        experts_lora(
            *batch[:3], base, up, down, batch[3], buffers=buffers, has_lora=True, phase=Phase.DECODE, config=SMALL
        )


def test_what_the_kernels_cannot_do_is_refused():
    batch, base, up, down, buffers = small_case(T=26, capacity=20)
    with pytest.raises(ConfigError, match="26 tokens exceed the 20"):
        run(batch, base, up, down, buffers)
    with pytest.raises(ConfigError, match="scratch was made for"):
        experts_lora(batch[0].bfloat16(), *batch[1:3], base, up, down, batch[3], buffers=buffers, has_lora=True)


def test_the_built_in_configuration_depends_on_shapes_alone():
    for tokens in (1, 512, 16384):
        one = default_config(tokens=tokens, top_k=8, num_experts=128, dtype=torch.bfloat16)
        assert one == default_config(tokens=tokens, top_k=8, num_experts=128, dtype=torch.bfloat16)
        assert one.block_m >= 64
