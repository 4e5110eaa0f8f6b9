"""RMSNorm against the naive truth and against the transformers modules whose rounding it follows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, TOLERANCE, randn, relative_error
from moelora.backends.fused_ops import NORM_GATES, NORM_VARIANTS
from moelora.errors import ConfigError
from moelora.models.norms import FusedGatedNorm, gated_norm_form, norm_form
from moelora.models.substitutes import _agree
from moelora_kernels.fused import TritonOps
from moelora_kernels.ops.rms_norm import naive_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [*NORM_VARIANTS, "no_weight"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_equals_naive(device, dtype, variant, with_residual):
    x = randn(5, 3, 40, seed=1, dtype=dtype, device=device)
    weight = None if variant == "no_weight" else randn(40, seed=2, dtype=dtype, device=device)
    residual = randn(5, 3, 40, seed=3, dtype=dtype, device=device) if with_residual else None
    variant = "model" if weight is None else variant
    total = residual.clone() if with_residual else None
    got = rms_norm(x, weight, 1e-6, variant=variant, residual=residual)
    want = naive_rms_norm(x, weight, 1e-6, variant=variant, residual=total)
    assert got.dtype == dtype
    assert relative_error(got, want) < TOLERANCE[dtype]
    if dtype == torch.float16:  # the interpreter rounds float16 as hardware does, bfloat16 towards zero
        assert relative_error(got, want) < 1e-4
    if with_residual:
        assert relative_error(residual, total) < TOLERANCE[dtype]
        assert torch.equal(residual, total) or dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [*NORM_VARIANTS, "no_weight"])
@pytest.mark.parametrize("kind", NORM_GATES)
def test_a_gate_behind_it(device, dtype, variant, kind):
    x, gate = (randn(5, 3, 40, seed=seed, dtype=dtype, device=device) * 4 for seed in (1, 3))
    weight = None if variant == "no_weight" else randn(40, seed=2, dtype=dtype, device=device)
    variant = "model" if weight is None else variant
    got = rms_norm(
        x, weight, 1e-6, variant=variant, gate=gate.transpose(0, 1).contiguous().transpose(0, 1), gate_kind=kind
    )
    want = naive_rms_norm(x, weight, 1e-6, variant=variant, gate=gate, gate_kind=kind)
    assert got.dtype == want.dtype == dtype
    assert relative_error(got, want) < TOLERANCE[dtype]
    if dtype == torch.float16:
        assert relative_error(got, want) < 2e-4


@pytest.mark.parametrize(
    ("module", "name", "form"),
    [
        ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", ("model", "silu")),
        ("kimi_linear", "KimiLinearRMSNormGated", ("float", "sigmoid")),
    ],
)
def test_gates_as_the_transformers_modules(module, name, form):
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    norm = getattr(modeling, name)(32, eps=1e-6).to(DEVICES[0], torch.float16)
    x, gate = (randn(1, 37, 32, seed=seed, dtype=torch.float16, device=DEVICES[0]) * 3 for seed in (5, 7))
    with torch.no_grad():
        norm.weight.copy_(randn(32, seed=6))
        assert gated_norm_form(norm, TritonOps(), x, gate, _agree) == (1e-6, *form)
        assert norm_form(norm, TritonOps(), x, _agree) is None
        fused = FusedGatedNorm(norm, TritonOps(), 1e-6, *form)
        assert _agree(fused(x, gate), norm(x, gate))
        assert torch.equal(fused(x, gate.float()), norm(x, gate.float())), "of another dtype: the module's own"


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=st.integers(0, 9), width=st.integers(1, 70), residual=st.booleans())
def test_any_shape(rows, width, residual):
    device = DEVICES[0]
    x = randn(rows, width, seed=1, device=device)
    weight = randn(width, seed=2, device=device)
    other = randn(rows, width, seed=3, device=device) if residual else None
    total = other.clone() if residual else None
    got = rms_norm(x, weight, 1e-5, residual=other)
    want = naive_rms_norm(x, weight, 1e-5, residual=total)
    if rows:
        assert relative_error(got, want) < TOLERANCE[torch.float32]
        assert not residual or torch.equal(other, total)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_alone(device):
    x = randn(40, 24, seed=1, device=device)
    weight = randn(24, seed=2, device=device)
    whole = rms_norm(x, weight, 1e-6)
    for row in (0, 7, 39):
        assert torch.equal(whole[row], rms_norm(x[row : row + 1], weight, 1e-6)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows(device):
    x = randn(6, 50, seed=1, device=device)[:, 10:34]
    weight = randn(24, seed=2, device=device)
    assert relative_error(rms_norm(x, weight, 1e-6), naive_rms_norm(x, weight, 1e-6)) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_rows_that_lie_apart(device):
    weight = randn(8, seed=2, device=device)
    wide = randn(5, 60, seed=1, device=device)
    heads = wide[:, 4:28].view(1, 5, 3, 8)
    for x in (heads, heads.transpose(1, 2), wide[:, 4:28].unsqueeze(0).unflatten(2, (3, 8))[..., ::1], wide[:, 4:12]):
        assert not x.is_contiguous()
        got = rms_norm(x, weight, 1e-6)
        assert got.is_contiguous()
        assert torch.equal(got, rms_norm(x.contiguous(), weight, 1e-6))
        assert relative_error(got, naive_rms_norm(x, weight, 1e-6)) < 1e-6


@pytest.mark.parametrize(
    ("module", "name", "variant"),
    [
        ("qwen3_moe", "Qwen3MoeRMSNorm", "model"),
        ("gpt_oss", "GptOssRMSNorm", "float"),
        ("qwen3_next", "Qwen3NextRMSNorm", "one_plus"),
    ],
)
def test_rounds_as_the_transformers_modules(module, name, variant):
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    norm = getattr(modeling, name)(32, eps=1e-6).to(torch.float16)
    x = randn(4, 32, seed=5, dtype=torch.float16)
    with torch.no_grad():
        norm.weight.copy_(randn(32, seed=6))
        got = naive_rms_norm(x, norm.weight, 1e-6, variant=variant)
        assert torch.equal(got, norm(x))
        x = randn(1, 37, 32, seed=7, dtype=torch.float16, device=DEVICES[0])
        assert norm_form(norm.to(DEVICES[0]), TritonOps(), x, _agree) == (1e-6, variant)


def test_refusals():
    x = randn(2, 8, seed=1, device=DEVICES[0])
    with pytest.raises(ConfigError, match="Did you mean 'model'"):
        rms_norm(x, None, 1e-6, variant="modle")
    with pytest.raises(ConfigError, match="unknown gate 'relu'"):
        rms_norm(x, None, 1e-6, gate=x, gate_kind="relu")
    with pytest.raises(ConfigError, match="several dtypes"):
        rms_norm(x, x[0].half(), 1e-6)
    with pytest.raises(ConfigError, match="the module's own norm"):
        rms_norm(torch.zeros(1, 40000, device=DEVICES[0]), None, 1e-6)
