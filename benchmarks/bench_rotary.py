"""Rotary embedding of 32 query and 4 key heads of 128, in place, bf16, against torch; and behind norms of heads."""

from __future__ import annotations

import torch
from dense_timing import floor_ms, measure_ms, report, require

from moelora.backends.fused_ops import HeadNorms
from moelora_kernels.ops.rms_norm import rms_norm
from moelora_kernels.ops.rotary import LAYOUTS, naive_rotary, rotary

DTYPE = torch.bfloat16


def main() -> None:
    tokens = 8192
    q, k = (torch.randn(tokens, heads, 128, device="cuda", dtype=DTYPE) for heads in (32, 4))
    angles = torch.randn(tokens, 64, device="cuda")
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    for layout in LAYOUTS:
        want = naive_rotary(q, cos, sin, layout=layout)
        require(torch.equal(rotary(q, k, cos, sin, layout=layout)[0], want), "rotary")
        measured = measure_ms(lambda s=layout: rotary(q, k, cos, sin, layout=s, inplace=True))
        theirs = measure_ms(lambda s=layout: (naive_rotary(q, cos, sin, layout=s), naive_rotary(k, cos, sin, layout=s)))
        floor = floor_ms(moved_bytes=2 * (2 * (q.numel() + k.numel()) + 2 * cos.numel()))
        report(f"rotary {layout}, {tokens} tokens", measured, floor, f"torch {theirs:.4f} ms")
    weight = torch.rand(128, device="cuda", dtype=DTYPE)
    norms = HeadNorms(q_weight_D=weight, k_weight_D=weight, eps=1e-6, variant="model")
    normed = [rms_norm(x, weight, 1e-6) for x in (q, k)]
    require(torch.equal(rotary(q, k, cos, sin, norms=norms)[0], rotary(*normed, cos, sin)[0]), "norms and rotary")
    measured = measure_ms(lambda: rotary(q, k, cos, sin, norms=norms))
    apart = measure_ms(lambda: rotary(*(rms_norm(x, weight, 1e-6) for x in (q, k)), cos, sin))
    floor = floor_ms(moved_bytes=2 * (2 * (q.numel() + k.numel()) + 2 * cos.numel()))
    report(f"norms of heads and rotary, {tokens} tokens", measured, floor, f"three kernels {apart:.4f} ms")


if __name__ == "__main__":
    main()
