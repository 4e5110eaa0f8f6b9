"""The dense ops at real shapes on a CUDA device: q, k, v, o of Qwen3-30B-A3B, one token to 16,384, bf16 and fp32."""

from dataclasses import replace

import pytest
import torch

from kernels.dense_common import make_bank, relative_error, run_tiles, sorted_tiles
from moelora.backends import get_backend
from moelora.backends.base import DenseSlots
from moelora.backends.fused_ops import HeadNorms
from moelora.batching.packing import pack_ids
from moelora.capacity import PrefillCapacity
from moelora.types import PackedBatch, Phase
from moelora_kernels import tiled
from moelora_kernels.ops.causal_conv import causal_conv, naive_causal_conv
from moelora_kernels.ops.dense_lora import (
    dense_lora,
    embedding_lora,
    naive_dense_lora,
    naive_embedding_lora,
    scratch_numel,
)
from moelora_kernels.ops.gated_activation import KINDS, gated_activation, naive_gated_activation, split_gate_up
from moelora_kernels.ops.invariant_gemm import invariant_gemm
from moelora_kernels.ops.lora_gemm import lora_gemm, naive_lora_gemm
from moelora_kernels.ops.rms_norm import naive_rms_norm, rms_norm
from moelora_kernels.ops.rotary import LAYOUTS, naive_rotary, rotary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN, QUERY, KEY = 2048, 4096, 512
RANKS = [16, 64, 16, 8, 64, 3, 0, 16]
DTYPES = [torch.bfloat16, torch.float32]
LIMIT = {torch.bfloat16: 4e-3, torch.float32: 2e-6}
ORDERS = {"runs": lambda slots, rows: run_tiles(slots, rows, "cuda"), "sorted": lambda s, r: sorted_tiles(s, "cuda", r)}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def bank(width_in: int, width_out: int, dtype: torch.dtype, ranks=RANKS) -> DenseSlots:
    return make_bank(ranks, width_in, width_out, seed=width_in + width_out, dtype=dtype, device="cuda")


def packed(lengths: list[int], slots: list[int]) -> PackedBatch:
    return pack_ids([[0] * length for length in lengths], slots, torch.device("cuda"))


def ragged_slots(tokens: int, seed: int = 0, run: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    slots: list[int] = []
    while len(slots) < tokens:
        slot, length = torch.randint(-1, len(RANKS), (2,), generator=generator).tolist()[0], 1
        length = int(torch.randint(1, run, (1,), generator=generator))
        slots += [slot] * length
    return slots[:tokens]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "tile_rows"), [(1, 16), (13, 16), (700, 16), (700, 32), (3000, 64), (16384, 128)])
@pytest.mark.parametrize("order", ["runs", "sorted"])
def test_projections(dtype, tokens, tile_rows, order):
    slots = ragged_slots(tokens)
    slot_T = torch.tensor(slots, dtype=torch.int32, device="cuda")
    rows = ORDERS[order](slots, tile_rows)
    for width_in, widths in ((HIDDEN, (QUERY, KEY, KEY)), (QUERY, (HIDDEN,))):
        banks = [bank(width_in, width, dtype) for width in widths]
        x_TK = draw(tokens, width_in, dtype=dtype, seed=1)
        outs = [draw(tokens, width, dtype=dtype, seed=2) for width in widths]
        wants = [out.clone() for out in outs]
        scratch = torch.full((scratch_numel(tokens, 64),), float("nan"), dtype=dtype, device="cuda")
        dense_lora(x_TK, outs, banks, rows, scratch=scratch)
        for got, want, one in zip(outs, wants, banks, strict=True):
            base = want.clone()
            naive_dense_lora(x_TK, want, one, slot_T)
            assert relative_error(got, want) < LIMIT[dtype]
            assert torch.equal(got[slot_T < 0], base[slot_T < 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_bits_do_not_depend_on_tile_order_or_neighbours(dtype):
    slots = ragged_slots(900)
    one = bank(HIDDEN, QUERY, dtype)
    x_TK, base = draw(900, HIDDEN, dtype=dtype, seed=1), draw(900, QUERY, dtype=dtype, seed=2)

    def run(rows: list[int], order: str, tile_rows: int) -> torch.Tensor:
        out = base[rows].clone()
        dense_lora(x_TK[rows], [out], [one], ORDERS[order]([slots[row] for row in rows], tile_rows))
        return out

    everything = list(range(900))
    whole = run(everything, "runs", 16)
    for order, tile_rows in (("runs", 32), ("runs", 64), ("runs", 128), ("sorted", 16), ("sorted", 64)):
        assert torch.equal(whole, run(everything, order, tile_rows)), (order, tile_rows)
    assert torch.equal(whole.flip(0), run(everything[::-1], "runs", 64))
    for row in (0, 450, 899):
        assert torch.equal(whole[row : row + 1], run([row], "runs", 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype):
    slots = ragged_slots(3000)
    one = bank(50000, HIDDEN, dtype)
    ids_T = torch.randint(0, 50000, (3000,), device="cuda")
    out = draw(3000, HIDDEN, dtype=dtype, seed=2)
    want = out.clone()
    naive_embedding_lora(ids_T, want, one, torch.tensor(slots, device="cuda"))
    embedding_lora(ids_T, out, one, run_tiles(slots, 16, "cuda"))
    assert relative_error(out, want) < LIMIT[dtype]


def test_rows_behind_two_to_the_31_elements():
    tokens, live = 2**20 + 64, 40
    slots = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
    slots[-live:] = 1
    backend = get_backend("triton")
    meta = backend.rows_metadata(slots, has_lora=True)
    one = bank(HIDDEN, HIDDEN, torch.bfloat16)
    x_TK = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(x_TK)
    x_TK[-live:] = draw(live, HIDDEN, dtype=torch.bfloat16, seed=1)
    backend.linear(x_TK, out, one, meta)
    want = torch.zeros(live, HIDDEN, dtype=torch.bfloat16, device="cuda")
    naive_dense_lora(x_TK[-live:], want, one, slots[-live:])
    assert relative_error(out[-live:], want) < LIMIT[torch.bfloat16]
    assert not bool(out[:-live].any())
    weight = draw(128, HIDDEN, dtype=torch.bfloat16, seed=3)
    product = invariant_gemm(x_TK, weight)
    assert torch.equal(product[-live:], invariant_gemm(x_TK[-live:].clone(), weight))
    normed = rms_norm(x_TK, None, 1e-6)
    assert relative_error(normed[-live:], naive_rms_norm(x_TK[-live:], None, 1e-6)) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_invariant_gemm(dtype):
    x, w = draw(2500, HIDDEN, dtype=dtype, seed=1), draw(1536, HIDDEN, dtype=dtype, seed=2)
    whole = invariant_gemm(x, w)
    want = (x.double() @ w.double().T).float()
    assert relative_error(whole.float(), want) < (2e-6 if dtype == torch.float32 else 4e-3)
    for rows in (1, 16, 17, 33, 64, 65, 128, 129, 700, 1025):
        for first in (0, 2500 - rows):
            assert torch.equal(invariant_gemm(x[first : first + rows].clone(), w), whole[first : first + rows]), rows


@pytest.mark.parametrize("lies", ["joined", "apart"])
@pytest.mark.parametrize("name", ["triton", "csgmv"])
def test_projections_of_a_large_batch(lies, name, monkeypatch):
    """q, k, v at real shapes, LoRA in the base product; a row's bits are those of the row in a batch of one request."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 150, (40,), generator=generator).tolist()
    slots = torch.randint(-1, len(RANKS), (40,), generator=generator).tolist()
    backend = get_backend(name)
    capacity = PrefillCapacity(
        max_tokens=8192, max_requests=64, full_max_requests=64, slots=len(RANKS), max_rank=max(RANKS)
    )
    backend.init_graph_metadata(Phase.PREFILL, capacity, torch.device("cuda"))
    widths = (QUERY, KEY, KEY)
    banks = [bank(HIDDEN, width, torch.bfloat16) for width in widths]
    weights = [draw(width, HIDDEN, dtype=torch.bfloat16, seed=width) / HIDDEN**0.5 for width in widths]
    if lies == "joined":
        weights = list(torch.cat(weights).split(widths))
    x_TK = draw(sum(lengths), HIDDEN, dtype=torch.bfloat16, seed=1)
    meta = backend.prepare_batch(packed(lengths, slots), phase=Phase.PREFILL)
    assert x_TK.shape[0] >= tiled.RIDE_ROWS
    outs = backend.projections(x_TK, weights, [None] * 3, banks, meta)
    for out, weight, one in zip(outs, weights, banks, strict=True):
        want = naive_lora_gemm(x_TK, weight, None, one, meta.token_slot_T)
        assert relative_error(out, want) < LIMIT[torch.bfloat16]
    starts = [sum(lengths[:i]) for i in range(40)]
    monkeypatch.setattr(tiled, "RIDE_ROWS", 1)  # else so few rows would have no list of slots for it
    for i in (0, 7, 39):
        rows = slice(starts[i], starts[i] + lengths[i])
        alone = backend.prepare_batch(packed([lengths[i]], [slots[i]]), phase=Phase.PREFILL)
        handle = alone.private
        parts = lora_gemm(x_TK[rows].clone(), weights, [None] * 3, banks, handle.rows, handle.blocks)
        for whole, part in zip(outs, parts, strict=True):
            assert torch.equal(whole[rows], part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rotary_activation(dtype):
    x, residual, weight = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate(((999, 2048), (999, 2048), (2048,))))
    total = residual.clone()
    got = rms_norm(x, weight, 1e-6, residual=residual)
    want = naive_rms_norm(x, weight, 1e-6, residual=total)
    assert torch.equal(residual, total)
    assert relative_error(got, want) < LIMIT[dtype]
    heads, head_weight = draw(999, 32, 128, dtype=dtype, seed=5), weight[:128].contiguous()
    assert relative_error(rms_norm(heads, head_weight, 1e-6), naive_rms_norm(heads, head_weight, 1e-6)) < LIMIT[dtype]
    angles = draw(999, 64, seed=6)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for layout in LAYOUTS:
        turned, _ = rotary(heads, heads[:, :4], cos, sin, layout=layout)
        assert torch.equal(turned, naive_rotary(heads, cos, sin, layout=layout)), layout
        q, k = heads.clone(), heads[:, :4].clone()
        rotary(q, k, cos, sin, layout=layout, inplace=True)
        assert torch.equal(q, turned), layout
    for pairs in (64, 32):  # all of a head, and half of it
        norms = HeadNorms(q_weight_D=head_weight, k_weight_D=head_weight, eps=1e-6, variant="model")
        normed, angles = rms_norm(heads, head_weight, 1e-6), (cos[:, :pairs], sin[:, :pairs])
        q, k = rotary(heads, heads[:, :4], *angles, norms=norms)
        assert torch.equal(q, rotary(normed, normed[:, :4], *angles)[0]), "the bits of two kernels"
        assert torch.equal(k, q[:, :4])
    for kind in KINDS:
        gate, up = split_gate_up(draw(999, 1536, dtype=dtype, seed=7) * 3, interleaved=kind == "gpt_oss")
        error = relative_error(gated_activation(gate, up, kind=kind), naive_gated_activation(gate, up, kind=kind))
        assert error < LIMIT[dtype], kind


@pytest.mark.parametrize("name", ["triton", "csgmv"])
def test_a_graph_captured_from_base_rows_serves_any_batch(name):
    capacity = PrefillCapacity(max_tokens=512, max_requests=64, full_max_requests=64, slots=len(RANKS), max_rank=64)
    backend, device = get_backend(name), torch.device("cuda")
    backend.init_graph_metadata(Phase.PREFILL, capacity, device)
    one = bank(HIDDEN, KEY, torch.bfloat16)
    x_TK, out = draw(512, HIDDEN, dtype=torch.bfloat16, seed=1), draw(512, KEY, dtype=torch.bfloat16, seed=2)
    base = out.clone()

    # Whoever captures says whether LoRA is recorded; base rows alone would not.
    meta = replace(backend.prepare_batch(packed([500], [-1]), phase=Phase.PREFILL, bucket=512), has_lora=True)
    for _ in range(2):
        backend.linear(x_TK, out, one, meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.linear(x_TK, out, one, meta)
    for lengths, slots in (([7] * 60, [i % 9 - 1 for i in range(60)]), ([1], [1]), ([500], [-1]), ([300, 200], [4, 0])):
        meta = backend.prepare_batch(packed(lengths, slots), phase=Phase.PREFILL, bucket=512)
        out.copy_(base)
        graph.replay()
        eager = base.clone()
        backend.linear(x_TK, eager, one, meta)
        want = base.clone()
        naive_dense_lora(x_TK, want, one, meta.token_slot_T)
        assert torch.equal(out, eager)
        assert relative_error(out, want) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1,), (3, 1, 700, 96), (16000, 384)])
def test_causal_conv(dtype, lengths):
    x, weight = draw(sum(lengths), 8192, dtype=dtype, seed=1), draw(8192, 4, dtype=dtype, seed=2)
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])
    got = causal_conv(x, weight, None, positions, activation="silu")
    assert relative_error(got, naive_causal_conv(x, weight, None, positions, activation="silu")) < LIMIT[dtype]
    first = causal_conv(x[: lengths[0]].clone(), weight, None, positions[: lengths[0]], activation="silu")
    assert torch.equal(got[: lengths[0]], first)
