"""Rotary embedding against the naive truth and the transformers functions whose layouts it takes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, TOLERANCE, Guarded, randn, relative_error
from moelora.backends.fused_ops import NORM_VARIANTS, HeadNorms
from moelora.errors import ConfigError
from moelora.models.rotary import rotate, times_of_angles
from moelora.models.substitutes import _agree
from moelora_kernels.fused import TritonOps
from moelora_kernels.ops.rms_norm import rms_norm
from moelora_kernels.ops.rotary import LAYOUTS, naive_rotary, rotary


def inputs(tokens, heads_q, heads_k, size, pairs, dtype, device):
    angles = randn(tokens, pairs, seed=3, device=device)
    return (
        randn(tokens, heads_q, size, seed=1, dtype=dtype, device=device),
        randn(tokens, heads_k, size, seed=2, dtype=dtype, device=device),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_equals_naive(device, dtype, layout, wide, inplace):
    q, k, cos, sin = inputs(3, 5, 2, 20, 8, dtype, device)
    want_q, want_k = (naive_rotary(x, cos, sin, layout=layout, wide=wide) for x in (q, k))
    got_q, got_k = rotary(q, k, cos, sin, layout=layout, wide=wide, inplace=inplace)
    assert (got_q is q) == inplace
    for got, want in ((got_q, want_q), (got_k, want_k)):
        assert relative_error(got, want) < TOLERANCE[dtype]
        if dtype is not torch.bfloat16 or device == "cuda":  # the interpreter rounds bfloat16 towards zero
            assert torch.equal(got, want), "every rounding step is torch's"


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 4),
    heads_q=st.integers(1, 6),
    heads_k=st.integers(1, 3),
    pairs=st.integers(1, 9),
    rest=st.integers(0, 5),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_shape_inside_its_buffer(tokens, heads_q, heads_k, pairs, rest, layout):
    device, size = DEVICES[0], 2 * pairs + rest
    q, k, cos, sin = inputs(tokens, heads_q, heads_k, size, pairs, torch.float32, device)
    own = Guarded(q.shape, torch.float32, device)
    own.tensor.copy_(q)
    got_q, _ = rotary(own.tensor, k, cos, sin, layout=layout, inplace=True)
    own.check()
    if tokens:
        assert torch.equal(got_q, naive_rotary(q, cos, sin, layout=layout))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", NORM_VARIANTS)
@pytest.mark.parametrize(("size", "pairs"), [(16, 8), (20, 6)])
@pytest.mark.parametrize("inplace", [False, True])
def test_norms_of_heads_have_the_bits_of_two_kernels(device, dtype, variant, size, pairs, inplace):
    q, k, cos, sin = inputs(3, 5, 2, size, pairs, dtype, device)
    q = torch.cat([q, torch.full_like(q, torch.nan)], 1)[:, :5]  # rows apart, poison between them
    weights = [randn(size, seed=seed, dtype=dtype, device=device) for seed in (4, 5)]
    norms = HeadNorms(q_weight_D=weights[0], k_weight_D=weights[1], eps=1e-5, variant=variant)
    normed = [rms_norm(x, w, 1e-5, variant=variant) for x, w in zip((q, k), weights, strict=True)]
    want = rotary(*normed, cos, sin)
    got = rotary(q, k, cos, sin, norms=norms, inplace=inplace)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_heads_before_tokens(device):
    q, k, cos, sin = inputs(4, 3, 2, 12, 6, torch.float32, device)
    laid = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert laid.stride() != q.stride()
    assert torch.equal(rotary(laid, k, cos, sin)[0], naive_rotary(q, cos, sin))


@pytest.mark.parametrize(
    ("module", "function", "layout", "wide"),
    [
        ("qwen3_moe", "apply_rotary_pos_emb", "half", False),
        ("glm4", "apply_rotary_pos_emb", "interleaved", False),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", "interleaved_to_half", False),
    ],
)
def test_is_the_transformers_function(module, function, layout, wide):
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    q, k, cos, sin = inputs(4, 3, 2, 16, 8, torch.float16, "cpu")
    double_cos, double_sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    theirs, _ = getattr(modeling, function)(q[None], k[None], double_cos, double_sin, unsqueeze_dim=2)
    assert torch.equal(naive_rotary(q, cos, sin, layout=layout, wide=wide), theirs[0])


def test_refusals():
    q, k, cos, sin = inputs(2, 2, 1, 12, 6, torch.float32, DEVICES[0])
    with pytest.raises(ConfigError, match="Valid: half"):
        rotary(q, k, cos, sin, layout="full")
    with pytest.raises(ConfigError, match="several dtypes"):
        rotary(q.half(), k.half(), cos, sin)
    with pytest.raises(ConfigError, match="6 pairs in heads of 8"):
        rotary(q[..., :8], k[..., :8], cos, sin)


def test_norms_of_heads_that_are_refused():
    q, k, cos, sin = inputs(2, 2, 1, 12, 6, torch.float32, DEVICES[0])
    norms = HeadNorms(q_weight_D=q[0, 0], k_weight_D=q[0, 1], eps=1e-5, variant="model")
    with pytest.raises(ConfigError, match=r"RMSNorm variant 'wide'"):
        rotary(q, k, cos, sin, norms=replace(norms, variant="wide"))
    with pytest.raises(ConfigError, match="several dtypes"):
        rotary(q, k, cos, sin, norms=replace(norms, k_weight_D=q[0, 1].half()))
    with pytest.raises(ConfigError, match="norms of heads with layout 'interleaved'"):
        rotary(q, k, cos, sin, layout="interleaved", norms=norms)


@pytest.mark.parametrize(("module", "times"), [("qwen3_moe", 2), ("mixtral", 2), ("gpt_oss", 1), ("glm4", 0)])
def test_functions_of_transformers_whose_place_the_kernel_takes(module, times):
    """By how often an angle stands in cos and sin; 0: the function pairs elements otherwise, and stays."""
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")

    def draw(*shape):
        return randn(*shape, seed=sum(shape), device=DEVICES[0])

    with torch.inference_mode():
        assert times_of_angles(modeling.apply_rotary_pos_emb, TritonOps(), draw, _agree) == times
        if times:
            q, k, half = draw(1, 4, 5, 12), draw(1, 2, 5, 12), draw(1, 5, 6)
            cos, sin = torch.cat([half] * times, -1), torch.cat([half.cos()] * times, -1)
            want = modeling.apply_rotary_pos_emb(q, k, cos, sin)
            for one, other in zip(rotate(TritonOps(), q, k, cos, sin, times=times), want, strict=True):
                torch.testing.assert_close(one, other)
