"""RMSNorm of hidden rows (with the residual sum) and of query heads, bf16, against torch's own steps."""

from __future__ import annotations

import torch
from dense_timing import close, floor_ms, measure_ms, report, require

from moelora_kernels.ops.rms_norm import naive_rms_norm, rms_norm

DTYPE = torch.bfloat16


def main() -> None:
    for tokens, heads, width, with_residual in ((8192, 1, 2048, True), (8192, 1, 2048, False), (8192, 32, 128, False)):
        x = torch.randn(tokens, heads, width, device="cuda", dtype=DTYPE)
        weight = torch.randn(width, device="cuda", dtype=DTYPE)
        residual = torch.randn_like(x) if with_residual else None

        def ours(x=x, weight=weight, residual=residual):
            return rms_norm(x, weight, 1e-6, residual=residual)

        def theirs(x=x, weight=weight, residual=residual):
            return naive_rms_norm(x, weight, 1e-6, residual=residual)

        total = residual.clone() if with_residual else None
        require(close(ours(), theirs(residual=total), 4e-3), "rms_norm")
        floor = floor_ms(moved_bytes=x.numel() * 2 * (4 if with_residual else 2))
        report(f"rms_norm {tokens}×{heads}×{width} residual={with_residual}", measure_ms(ours), floor,
               f"torch {measure_ms(theirs):.4f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
