"""The causal convolution of Qwen3.5-35B-A3B (8,192 channels, 4 taps), 32 requests of 512 tokens, bf16, and torch's."""

from __future__ import annotations

import torch
from dense_timing import close, floor_ms, measure_ms, report, require
from torch.nn import functional

from moelora_kernels.ops.causal_conv import causal_conv, naive_causal_conv

CHANNELS, TAPS, REQUESTS, LENGTH = 8192, 4, 32, 512


def main() -> None:
    x = torch.randn(REQUESTS * LENGTH, CHANNELS, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(CHANNELS, TAPS, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(LENGTH, device="cuda").repeat(REQUESTS)

    def ours():
        return causal_conv(x, weight, None, positions, activation="silu")

    def theirs():  # requests of one length, side by side
        rows = x.view(REQUESTS, LENGTH, CHANNELS).transpose(1, 2)
        out = functional.conv1d(rows, weight[:, None], padding=TAPS - 1, groups=CHANNELS)[:, :, :LENGTH]
        return functional.silu(out).transpose(1, 2).reshape(x.shape)

    require(close(ours(), naive_causal_conv(x, weight, None, positions, activation="silu"), 8e-3), "causal_conv")
    require(close(ours(), theirs(), 8e-3), "causal_conv")
    floor = floor_ms(moved_bytes=2 * x.numel() * 2)
    report(f"causal_conv {x.shape[0]}×{CHANNELS}", measure_ms(ours), floor, f"torch {measure_ms(theirs):.4f} ms")


if __name__ == "__main__":
    main()
