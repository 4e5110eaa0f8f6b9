"""The gated delta rule, token by token (arXiv 2412.06464, eq. 10), with boundaries; counts its calls."""

from itertools import pairwise

import torch

CALLS = []
"""The number of requests of each call, None without boundaries."""

refusing = False
"""True: fails as a kernel does on tensors of the CPU."""


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):  # fmt: skip
    """q, k `[1, T, H, K]`, v `[1, T, HV, V]`, g and beta `[1, T, HV]`: `[1, T, HV, V]` and no state."""
    if refusing:
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    assert initial_state is None
    assert not output_final_state
    assert q.shape[0] == 1
    CALLS.append(None if cu_seqlens is None else len(cu_seqlens) - 1)
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert ends[-1] == q.shape[1]
    heads, width = v.shape[2], q.shape[3]
    q, k, v, g, beta = (x[0].float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    q = q * (width**-0.5 if scale is None else scale)
    out = torch.empty_like(v)
    for begin, end in pairwise(ends):
        state = v.new_zeros(heads, width, v.shape[2])
        for t in range(begin, end):
            state = state * g[t].exp()[:, None, None]
            told = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - told) * beta[t][:, None])
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out.unsqueeze(0), None
