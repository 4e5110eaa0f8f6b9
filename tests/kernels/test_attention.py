"""Packed attention: each sequence as alone, whatever the boundaries; padding is zero; bits do not move."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moelora.errors import ConfigError
from moelora_kernels.ops import attention
from moelora_kernels.ops.attention import AttentionConfig, attention_tiles, varlen_attention
from moelora_kernels.ops.attention.naive import naive_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
SMALL = AttentionConfig(block_m=16, block_n=16, warps=4, stages=1)


def make(lengths, padding, H, G, D, Dv, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    T = sum(lengths) + padding
    q, k, v = (torch.randn(T, n, d, generator=g).to(dtype).to(DEVICE) for n, d in ((H, D), (G, D), (G, Dv)))
    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    for t in (q, k, v):
        t[boundaries[-1] :] = float("nan")
    return q, k, v, boundaries


def run(q, k, v, boundaries, config=SMALL, **options):
    cu = torch.tensor(boundaries, dtype=torch.int32, device=DEVICE)
    tiles = attention_tiles(cu, q.shape[0], config)
    return varlen_attention(q, k, v, cu, q.shape[0], backend="triton", tiles=tiles, **options)


@FEW
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    padding=st.sampled_from([0, 1, 20]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    widths=st.sampled_from([(16, 16), (24, 16), (16, 20), (40, 32)]),
    window=st.sampled_from([None, 1, 7, 100]),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 99),
)
def test_equals_each_sequence_alone(lengths, padding, heads, widths, window, sinks, softcap, seed):
    if sum(lengths) + padding == 0:
        lengths = [1]
    q, k, v, boundaries = make(lengths, padding, *heads, *widths, seed=seed)
    sinks_H = torch.linspace(-2, 2, heads[0], device=DEVICE) if sinks else None
    options = {"scale": widths[0] ** -0.5, "window": window, "sinks_H": sinks_H, "softcap": softcap}
    out = run(q, k, v, boundaries, **options)
    expected = naive_attention(q, k, v, boundaries, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    assert (out[boundaries[-1] :] == 0).all()
    assert torch.equal(run(q, k, v, boundaries, replace(SMALL, split=True), **options), out)


def test_sixteen_bits_and_latent_widths():
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    q, k, v, boundaries = make([33, 5], 3, 2, 2, 192, 128, dtype=dtype)
    out = run(q, k, v, boundaries, scale=0.05)
    expected = naive_attention(q, k, v, boundaries, scale=0.05)
    assert ((out.double() - expected).norm() / expected.norm()).item() < 8e-3


def test_unused_slots_are_empty_sequences_at_the_last_boundary():
    q, k, v, boundaries = make([5, 17], 2, 2, 1, 16, 16)
    few = run(q, k, v, boundaries, scale=0.3)
    assert torch.equal(run(q, k, v, [*boundaries, 22, 22, 22, 22, 22], scale=0.3), few)


def test_a_sequence_has_the_same_bits_alone_and_among_others():
    q, k, v, boundaries = make([7, 37, 12], 0, 2, 1, 16, 16)
    for window in (None, 9):
        together = run(q, k, v, boundaries, scale=0.3, window=window)
        for begin, end in pairwise(boundaries):
            alone = run(q[begin:end], k[begin:end], v[begin:end], [0, end - begin], scale=0.3, window=window)
            assert torch.equal(alone, together[begin:end])


def test_rows_of_a_larger_projection_need_no_copy():
    q, k, v, boundaries = make([9], 0, 2, 2, 16, 16)
    fused = torch.cat([q, k, v], dim=1)
    out = run(*fused.split(2, dim=1), boundaries, scale=0.3)
    assert torch.equal(out, run(q, k, v, boundaries, scale=0.3))


def test_no_rows_and_refusals():
    q, k, v, _ = make([4], 0, 2, 1, 16, 16)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    assert varlen_attention(q[:0], k[:0], v[:0], cu * 0, 0, scale=1.0).shape == (0, 2, 16)
    with pytest.raises(ConfigError, match=r"it takes bfloat16|it needs CUDA"):
        varlen_attention(q, k, v, cu, 4, scale=1.0, backend="torch")
    with pytest.raises(ConfigError, match="unknown attention backend"):
        varlen_attention(q, k, v, cu, 4, scale=1.0, backend="flash")
    with pytest.raises(ConfigError, match="window must be at least 1"):
        varlen_attention(q, k, v, cu, 4, scale=1.0, window=0)


def test_more_tiles_than_programs(monkeypatch):
    monkeypatch.setattr(attention, "_SPARE_TILES", 0)
    lengths = [3, 1, 5, 2, 20, 1, 1, 4] * 5
    q, k, v, boundaries = make(lengths, 7, 2, 1, 16, 16, seed=3)
    out = run(q, k, v, boundaries, scale=0.25)
    alone = [run(*(t[a:b] for t in (q, k, v)), [0, b - a], scale=0.25) for a, b in pairwise(boundaries)]
    assert torch.equal(out[: boundaries[-1]], torch.cat(alone))
    assert (out[boundaries[-1] :] == 0).all()
