"""Gated activations of 65,536 pairs of width 768 (8,192 tokens, 8 experts each), bf16, against torch's own steps."""

from __future__ import annotations

import torch
from dense_timing import close, floor_ms, measure_ms, report, require

from moelora_kernels.ops.gated_activation import KINDS, gated_activation, naive_gated_activation, split_gate_up


def main() -> None:
    x = torch.randn(65536, 1536, device="cuda", dtype=torch.bfloat16) * 3
    for kind in KINDS:
        gate, up = split_gate_up(x, interleaved=kind == "gpt_oss")

        def ours(gate=gate, up=up, kind=kind):
            return gated_activation(gate, up, kind=kind)

        def theirs(gate=gate, up=up, kind=kind):
            return naive_gated_activation(gate, up, kind=kind)

        require(close(ours(), theirs(), 4e-3), "gated_activation")
        report(f"gated_activation {kind}", measure_ms(ours), floor_ms(moved_bytes=3 * gate.numel() * 2),
               f"torch {measure_ms(theirs):.4f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
