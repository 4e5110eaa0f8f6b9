"""Gated activations against the naive truth, for halves side by side and interleaved."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, TOLERANCE, randn, relative_error
from moelora.errors import ConfigError
from moelora_kernels.ops.gated_activation import KINDS, gated_activation, naive_gated_activation, split_gate_up


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_naive(device, dtype, kind, interleaved):
    gate, up = split_gate_up(randn(5, 44, seed=1, dtype=dtype, device=device) * 4, interleaved=interleaved)
    got = gated_activation(gate, up, kind=kind)
    want = naive_gated_activation(gate, up, kind=kind)
    assert got.dtype == dtype
    assert relative_error(got, want) < TOLERANCE[dtype]
    if dtype == torch.float16:  # the interpreter rounds float16 as hardware does
        assert relative_error(got, want) < 1e-4


@settings(max_examples=10, deadline=None, derandomize=True)
@given(rows=st.integers(0, 6), width=st.integers(1, 70), kind=st.sampled_from(KINDS))
def test_any_shape(rows, width, kind):
    gate, up = (randn(rows, width, seed=seed, device=DEVICES[0]) for seed in (1, 2))
    got = gated_activation(gate, up, kind=kind)
    assert got.shape == (rows, width)
    if rows:
        assert relative_error(got, naive_gated_activation(gate, up, kind=kind)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_and_large_values_stay_finite(device, kind):
    gate = torch.tensor([[float("nan"), -200.0, 200.0, 0.0]], device=device)
    got = gated_activation(gate, torch.full_like(gate, 0.5), kind=kind)
    assert bool(got[0, 0].isnan())
    assert bool(got[0, 1:].isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_alone(device):
    gate, up = split_gate_up(randn(30, 40, seed=1, device=device), interleaved=False)
    whole = gated_activation(gate, up)
    for row in (0, 29):
        assert torch.equal(whole[row : row + 1], gated_activation(gate[row : row + 1], up[row : row + 1]))


def test_the_naive_clamp_is_the_transformers_gate():
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")

    class Own:
        limit, alpha = 7.0, 1.702

    x = randn(4, 20, seed=1, dtype=torch.float16) * 8
    gate, up = split_gate_up(x, interleaved=True)
    assert torch.equal(naive_gated_activation(gate, up, kind="gpt_oss"), modeling.GptOssExperts._apply_gate(Own, x))


def test_refusals():
    x = randn(2, 7, seed=1, device=DEVICES[0])
    with pytest.raises(ConfigError, match="unknown gated activation 'relu2'"):
        gated_activation(x, x, kind="relu2")
    with pytest.raises(ConfigError, match="cannot be halved"):
        split_gate_up(x, interleaved=True)
    with pytest.raises(ConfigError, match="dtype float64 has no kernel"):
        gated_activation(x.double(), x.double())
