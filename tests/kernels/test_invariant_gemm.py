"""The batch-invariant product: right, and the same bits for a row at any place of any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, TOLERANCE, Guarded, randn, relative_error
from moelora.errors import ConfigError
from moelora_kernels.ops.invariant_gemm import invariant_gemm, naive_invariant_gemm, pick_config


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_naive(device, dtype, bias):
    x = randn(19, 50, seed=1, dtype=dtype, device=device)
    w = randn(45, 50, seed=2, dtype=dtype, device=device)
    b = randn(45, seed=3, dtype=dtype, device=device) if bias else None
    out = Guarded((19, 45), dtype, device)
    invariant_gemm(x, w, b, out_MN=out.tensor)
    out.check()
    assert relative_error(out.tensor, naive_invariant_gemm(x, w, b)) < TOLERANCE[dtype]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=st.integers(0, 40), width=st.integers(1, 70), inner=st.integers(1, 70))
def test_any_shape(rows, width, inner):
    device = DEVICES[0]
    x, w = randn(rows, inner, seed=1, device=device), randn(width, inner, seed=2, device=device)
    out = Guarded((rows, width), torch.float32, device)
    invariant_gemm(x, w, out_MN=out.tensor)
    out.check()
    if rows:
        assert relative_error(out.tensor, naive_invariant_gemm(x, w)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_at_any_place_of_any_batch(device, dtype):
    x = randn(150, 70, seed=1, dtype=dtype, device=device)
    w = randn(40, 70, seed=2, dtype=dtype, device=device)
    whole = invariant_gemm(x, w)
    for rows in (1, 2, 33, 65):
        for first in (0, 150 - rows):
            part = invariant_gemm(x[first : first + rows].clone(), w)
            assert torch.equal(part, whole[first : first + rows]), (rows, first)


def test_only_the_dtype_decides_the_order_of_the_sums():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        chosen = {pick_config(dtype, rows, width).block_k for rows in (1, 100, 5000) for width in (8, 512, 9000)}
        assert len(chosen) == 1


def test_rows_may_lie_apart():
    device = DEVICES[0]
    x, w = randn(5, 60, seed=1, device=device)[:, 20:40], randn(8, 20, seed=2, device=device)
    assert relative_error(invariant_gemm(x, w), naive_invariant_gemm(x, w)) < 1e-6


def test_refusals():
    x = randn(4, 8, seed=1, device=DEVICES[0])
    with pytest.raises(ConfigError, match="several dtypes"):
        invariant_gemm(x, x.half())
    with pytest.raises(ConfigError, match="rows of W are not contiguous"):
        invariant_gemm(x, randn(8, 4, seed=1, device=DEVICES[0]).T)
    with pytest.raises(ConfigError, match="a matrix"):
        invariant_gemm(x[None], x)
