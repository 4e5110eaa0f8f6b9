"""Packed attention against one explicit softmax per sequence."""

import pytest
import torch

from moelora.errors import CheckpointError
from moelora.models.attention import moelora_attention, reference_attention
from moelora.models.context import Segments

LENGTHS = (1, 7, 4, 1, 12)


def segments(lengths=LENGTHS):
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    return Segments(cu_seqlens_S1=torch.tensor(bounds, dtype=torch.int32), lengths=tuple(lengths), longest=max(lengths))


def explicit(q, k, v, lengths, *, scale, window=None, sinks=None, softcap=None, mask=None):
    """The definition, element by element over one sequence at a time, in float64."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    begin = 0
    for n in lengths:
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k.shape[1])
            for i in range(n):
                low = 0 if window is None else max(0, i - window + 1)
                seen = [j for j in range(low, i + 1) if mask is None or mask[0, 0, begin + i, begin + j]]
                scores = torch.stack([scale * (q[begin + i, head] @ k[begin + j, kv]) for j in seen]).double()
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                extra = [] if sinks is None else [sinks[head].double().view(1)]
                weights = torch.softmax(torch.cat([scores, *extra]), 0)[: len(seen)]
                out[begin + i, head] = sum(w * v[begin + j, kv].double() for w, j in zip(weights, seen))
        begin += n
    return out


@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"sinks": True}, {"softcap": 2.0}, {"window": 5, "sinks": True}]
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(4, 2, 8, 8), (2, 2, 12, 5)])
def test_equals_the_definition(options, heads, kv_heads, dim, v_dim):
    torch.manual_seed(1)
    tokens = sum(LENGTHS)
    q, k, v = torch.randn(tokens, heads, dim), torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, v_dim)
    options = {**options, "scale": 0.4}
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads)
    got = reference_attention(q, k, v, segments(), **options)
    torch.testing.assert_close(got.double(), explicit(q, k, v, LENGTHS, **options), atol=2e-6, rtol=0)


def test_neighbours_and_padding_do_not_leak():
    torch.manual_seed(2)
    tokens = sum(LENGTHS)
    q, k, v = (torch.randn(tokens + 3, 2, 8) for _ in range(3))
    alone = reference_attention(q[1:8], k[1:8], v[1:8], segments((7,)), scale=1.0)
    for x in (q, k, v):
        x[:1] = x[8:] = float("nan")
    packed = reference_attention(q, k, v, segments(), scale=1.0)
    assert torch.equal(packed[1:8], alone)
    assert torch.equal(packed[tokens:], torch.zeros(3, 2, 8))


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_is_intersected_never_ignored(additive):
    torch.manual_seed(3)
    tokens = sum(LENGTHS)
    q, k, v = (torch.randn(tokens, 2, 8) for _ in range(3))
    mask = torch.rand(1, 1, tokens, tokens) > 0.4
    mask |= torch.eye(tokens, dtype=torch.bool)
    handed = torch.where(mask, 0.0, float("-inf")) if additive else mask
    got = reference_attention(q, k, v, segments(), scale=1.0, mask=handed)
    expected = explicit(q, k, v, LENGTHS, scale=1.0, mask=mask)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=0)


def test_an_unknown_argument_is_refused():
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(CheckpointError, match="window_pattern"):
        moelora_attention(torch.nn.Linear(1, 1), x, x, x, None, window_pattern=torch.zeros(1))
