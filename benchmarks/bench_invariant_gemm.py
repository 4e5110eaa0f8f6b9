"""The batch-invariant product against torch's own, at the projections of Qwen3-30B-A3B, bf16.

python benchmarks/bench_invariant_gemm.py [--sweep]
"""

from __future__ import annotations

import argparse

import torch
from dense_timing import close, floor_ms, measure_ms, report, require
from torch.nn.functional import linear

from moelora_kernels.ops.invariant_gemm import GemmConfig, invariant_gemm

DTYPE = torch.bfloat16


def floor(rows: int, width: int, inner: int) -> float:
    moved = 2 * (rows * inner + width * inner + rows * width)
    return floor_ms(moved_bytes=moved, flops=2.0 * rows * width * inner)


SWEEP = [
    GemmConfig(block_m=m, block_n=n, block_k=k, warps=warps, stages=stages)
    for m, n, k, warps, stages in (
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3),
        (64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 5), (16, 64, 64, 4, 5), (32, 128, 64, 4, 4),
        (128, 256, 128, 8, 2), (16, 32, 128, 4, 4), (64, 32, 64, 4, 5),
    )
]  # fmt: skip


def sweep(rows: int, width: int, inner: int) -> None:
    x, w = torch.randn(rows, inner, device="cuda", dtype=DTYPE), torch.randn(width, inner, device="cuda", dtype=DTYPE)
    reference = invariant_gemm(x, w)
    for config in SWEEP:
        name = f"  {rows}×{width}×{inner} blocks {config.block_m},{config.block_n},{config.block_k}"
        name += f" warps {config.warps} stages {config.stages}"
        try:
            same = torch.equal(invariant_gemm(x, w, config=config), reference)
            measured = measure_ms(lambda c=config: invariant_gemm(x, w, config=c), repeats=10)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:80]}", flush=True)
            continue
        report(name, measured, floor(rows, width, inner), f"same bits {same}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    for rows in (1, 64, 512, 8192):
        for width, inner in ((4096, 2048), (512, 2048), (2048, 4096), (128, 2048)):
            x = torch.randn(rows, inner, device="cuda", dtype=DTYPE)
            w = torch.randn(width, inner, device="cuda", dtype=DTYPE)
            require(close(invariant_gemm(x, w), linear(x.float(), w.float()), 4e-3), "invariant_gemm")
            report(f"invariant_gemm {rows}×{width}×{inner}", measure_ms(lambda x=x, w=w: invariant_gemm(x, w)),
                   floor(rows, width, inner), f"torch {measure_ms(lambda x=x, w=w: linear(x, w)):.4f} ms")  # fmt: skip
    if options.sweep:
        for shape in ((8192, 4096, 2048), (512, 4096, 2048), (64, 4096, 2048)):
            sweep(*shape)


if __name__ == "__main__":
    main()
