"""The k largest of a row: torch's values, and one order among equals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, randn
from moelora.errors import ConfigError
from moelora_kernels.ops.top_k import naive_top_k, naive_top_k_softmax, top_k, top_k_softmax


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 70),
    k=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    few=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_naive(rows, width, k, dtype, few, seed):
    x = randn(rows, 2 * width, seed=seed, dtype=dtype, device=DEVICES[0])[:, :width]
    if few:
        x = x.round()  # many equals
    k = min(k, width)
    values, indices = top_k(x, k)
    want_values, want_indices = naive_top_k(x, k)
    assert torch.equal(indices, want_indices)
    assert torch.equal(values, want_values)
    assert torch.equal(values, x.topk(k).values)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 70),
    k=st.integers(1, 9),
    given_in=st.sampled_from([torch.float32, torch.float16]),
    wanted_in=st.sampled_from([torch.float32, torch.float16]),
    normed=st.booleans(),
    scale=st.sampled_from([1.0, 60.0]),
    seed=st.integers(0, 99),
)
def test_softmax_equals_naive_and_torch(rows, width, k, given_in, wanted_in, normed, scale, seed):
    x = (scale * randn(rows, 2 * width, seed=seed, device=DEVICES[0]))[:, :width].to(given_in)
    k = min(k, width)
    values, indices = top_k_softmax(x, k, normed=normed, dtype=wanted_in)
    want_values, want_indices = naive_top_k_softmax(x, k, normed=normed, dtype=wanted_in)
    assert torch.equal(indices, want_indices)
    assert values.dtype == wanted_in
    torch.testing.assert_close(values, want_values, rtol=2e-3 if wanted_in is torch.float16 else 2e-6, atol=1e-12)
    own = torch.softmax(x, -1, dtype=torch.float32).topk(k, -1).values
    own = own / own.sum(-1, keepdim=True) if normed else own
    torch.testing.assert_close(values.float(), own, rtol=2e-3 if wanted_in is torch.float16 else 2e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_in_any_batch(device):
    x = randn(700, 128, seed=1, device=device)
    values, indices = top_k_softmax(x, 8, normed=True, dtype=torch.float32)
    for rows in (1, 3, 90):
        some_values, some_indices = top_k_softmax(x[:rows], 8, normed=True, dtype=torch.float32)
        assert torch.equal(some_values, values[:rows])
        assert torch.equal(some_indices, indices[:rows])


@pytest.mark.parametrize("device", DEVICES)
def test_infinities_and_nan(device):
    low, high, nan = float("-inf"), float("inf"), float("nan")
    x = torch.tensor([[low] * 5, [1.0, nan, high, 2.0, nan], [low, 0.0, low, -0.0, 3.0]], device=device)
    values, indices = top_k(x, 4)
    assert indices.tolist()[0] == [0, 1, 2, 3]
    assert sorted(indices.tolist()[1][:3]) == [1, 2, 4]
    assert indices.tolist()[1][3] == 3
    assert values[1, :3].isnan().sum() == 2
    assert indices.tolist()[2] == [4, 1, 3, 0]


def test_refuses_what_has_no_kernel():
    x = torch.zeros(2, 2000, device=DEVICES[0])
    for bad, k in ((x, 2), (x[:, :8], 9), (x[:, :40], 33), (x[:, :8], 0), (x[:, :8].long(), 2), (x[:, ::2][:, :9], 2)):
        with pytest.raises(ConfigError, match="top_k"):
            top_k(bad, k)
