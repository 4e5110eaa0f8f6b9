"""The causal convolution of packed requests against the naive truth, and against torch's for each request alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.dense_common import DEVICES, TOLERANCE, randn, relative_error
from moelora.errors import ConfigError
from moelora_kernels.ops.causal_conv import ACTIVATIONS, causal_conv, naive_causal_conv


def positions_of(lengths, device):
    return torch.cat([torch.arange(n) for n in [*lengths, 0]]).to(device)


def alone(x_TC, weight_CK, bias_C, lengths, activation):
    """Torch's own convolution, one request after the other."""
    outs = []
    for part in x_TC.split(list(lengths)):
        padded = functional.pad(part.t()[None], (weight_CK.shape[1] - 1, 0))
        out = functional.conv1d(padded, weight_CK[:, None], bias_C, groups=x_TC.shape[1])[0].t()
        outs.append(functional.silu(out) if activation == "silu" else out)
    return torch.cat(outs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_naive_and_torch(device, dtype, activation, with_bias):
    lengths = (5, 1, 2, 17, 3)
    x, weight = randn(28, 40, seed=1, dtype=dtype, device=device), randn(40, 4, seed=2, dtype=dtype, device=device)
    bias = randn(40, seed=3, dtype=dtype, device=device) if with_bias else None
    positions = positions_of(lengths, device)
    got = causal_conv(x, weight, bias, positions, activation=activation)
    assert got.dtype == dtype
    assert relative_error(got, naive_causal_conv(x, weight, bias, positions, activation=activation)) < TOLERANCE[dtype]
    assert relative_error(got, alone(x, weight, bias, lengths, activation)) < TOLERANCE[dtype]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    width=st.integers(1, 300),
    taps=st.integers(1, 6),
    channels_first=st.booleans(),
)
def test_any_shape_and_strides(lengths, width, taps, channels_first):
    device, tokens = DEVICES[0], sum(lengths)
    x = randn(width, tokens, seed=1, device=device).t() if channels_first else randn(tokens, width, seed=1)
    x, weight = x.to(device), randn(width, taps, seed=2, device=device)
    got = causal_conv(x, weight, None, positions_of(lengths, device))
    assert got.shape == (tokens, width)
    assert got.is_contiguous()
    if tokens:
        assert relative_error(got, alone(x, weight, None, [n for n in lengths if n], None)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_has_the_same_bits_alone_whatever_lies_before_it(device):
    lengths = (3, 30, 7)
    x, weight = randn(40, 20, seed=1, device=device), randn(20, 4, seed=2, device=device)
    x[:3] = float("nan")
    x[33:] = float("inf")
    whole = causal_conv(x, weight, None, positions_of(lengths, device), activation="silu")
    one = causal_conv(x[3:33], weight, None, positions_of([30], device), activation="silu")
    assert torch.equal(whole[3:33], one)
    assert bool(one.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_positions_that_go_on_from_an_earlier_part_read_nothing_before_the_row(device):
    x, weight = randn(6, 20, seed=1, device=device), randn(20, 4, seed=2, device=device)
    later = causal_conv(x, weight, None, positions_of([16], device)[10:])
    assert torch.equal(later, causal_conv(x, weight, None, positions_of([6], device)))


def test_refusals():
    x, weight = randn(3, 8, seed=1, device=DEVICES[0]), randn(8, 4, seed=2, device=DEVICES[0])
    positions = positions_of([3], DEVICES[0])
    with pytest.raises(ConfigError, match="unknown activation 'relu'"):
        causal_conv(x, weight, None, positions, activation="relu")
    with pytest.raises(ConfigError, match="17 taps"):
        causal_conv(x, randn(8, 17, seed=2, device=DEVICES[0]), None, positions)
    with pytest.raises(ConfigError, match="several dtypes"):
        causal_conv(x, weight.half(), None, positions)
