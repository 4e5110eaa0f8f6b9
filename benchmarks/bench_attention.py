"""Packed attention: torch's kernel, FlashAttention 4 where installed, and our own. Needs a CUDA device.

Each with exact boundaries, and as a full graph holds it: S request slots, and a bucket as the longest request.
"""

from __future__ import annotations

import torch
from graph_time import floor_ms, graph_time, refuse_unless

from moelora_kernels.ops.attention import (
    attention_tiles,
    flash4_refusal,
    pick_attention_config,
    varlen_attention,
)

HEADS, GROUPS, WIDTH = 32, 4, 128
SHAPES = ((64, 128, 64), (64, 128, 256), (64, 128, 1024), (16, 512, 64), (4, 4096, 64), (1, 16384, 16))
"""Requests, tokens of each, and the slots of a full graph."""


def measure(count: int, length: int, slots: int, backends: list[str]) -> None:
    tokens = count * length
    q = torch.randn(tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, tokens, GROUPS, WIDTH, device="cuda", dtype=torch.bfloat16).unbind(0)
    exact = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    padded = torch.cat([exact, exact[-1:].expand(slots - count)])

    def run(backend: str, cu: torch.Tensor, longest: int) -> torch.Tensor:
        # A full graph must not know the longest of its batch, and takes the blocks that suit short ones.
        config = pick_attention_config(q.dtype, WIDTH, WIDTH, longest=longest if cu is exact else None)
        tiles = attention_tiles(cu, tokens, config) if backend == "triton" else None
        return varlen_attention(q, k, v, cu, longest, scale=WIDTH**-0.5, backend=backend, tiles=tiles)

    ours = run("triton", exact, length).float()
    for backend in backends:
        for cu, longest in ((exact, length), (padded, tokens)):
            off = run(backend, cu, longest).float() - ours
            refuse_unless(bool(off.norm() < 1e-2 * ours.norm()), f"attention of {backend}")
    times = [
        graph_time(lambda b=b, c=c, m=m: run(b, c, m), copies=2)  # type: ignore[misc]
        for b in backends
        for c, m in ((exact, length), (padded, tokens))
    ]
    flops = 2.0 * count * length**2 * HEADS * WIDTH
    floor = floor_ms(num_bytes=4.0 * tokens * HEADS * WIDTH, flops=flops)
    shown = "".join(f"{ms:9.3f} {flops / ms / 1e9:5.0f}" for ms in times)
    print(f"{floor:9.3f}{shown}  {count} × {length}, {slots} slots")


def main() -> None:
    torch.manual_seed(0)
    refusal = flash4_refusal(torch.device("cuda"), torch.bfloat16, WIDTH, WIDTH)
    backends = ["torch", "triton"] if refusal else ["torch", "fa4", "triton"]
    if refusal:
        print(f"without FlashAttention 4: {refusal}")
    head = "".join(f"{name:>9} TF/s{name + ' full':>9} TF/s" for name in backends)
    print(f"{'floor ms':>9}{head}  requests × tokens, S")
    for count, length, slots in SHAPES:
        measure(count, length, slots, backends)


if __name__ == "__main__":
    main()
