"""Packed attention: torch's kernel, exact and with baked bounds, against our own. Needs a CUDA device."""

from __future__ import annotations

import torch
from graph_time import floor_ms, graph_time, refuse_unless

from moelora_kernels.ops.attention import attention_tiles, pick_attention_config, varlen_attention

HEADS, GROUPS, WIDTH = 32, 4, 128


def measure(count: int, length: int, slots: int) -> None:
    tokens = count * length
    q = torch.randn(tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, tokens, GROUPS, WIDTH, device="cuda", dtype=torch.bfloat16).unbind(0)
    exact = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    padded = torch.cat([exact, exact[-1:].expand(slots - count)]) if slots > count else exact
    cfg = pick_attention_config(q.dtype, WIDTH, WIDTH)

    def run(backend: str, cu: torch.Tensor, longest: int) -> torch.Tensor:
        tiles = attention_tiles(cu, tokens, cfg)
        return varlen_attention(
            q,
            k,
            v,
            cu,
            longest,
            scale=WIDTH**-0.5,
            backend=backend,
            tiles=tiles,
        )

    ours, peer = run("triton", exact, length), run("torch", exact, length)
    refuse_unless(bool((ours.float() - peer.float()).norm() < 1e-2 * peer.float().norm()), "attention")
    times = [
        graph_time(lambda b=b, c=c, m=m: run(b, c, m), copies=2)  # type: ignore[misc]
        for b, c, m in (
            ("torch", exact, length),
            ("torch", padded, tokens),
            ("triton", exact, length),
            ("triton", padded, tokens),
        )
    ]
    floor = floor_ms(num_bytes=4.0 * tokens * HEADS * WIDTH, flops=2.0 * count * length**2 * HEADS * WIDTH)
    print(
        f"{'':9}{floor:7.3f}{times[0]:9.3f}{times[1]:31.3f}{times[2]:9.3f}{times[3]:17.3f}  {count} × {length}, {slots}"
    )


def main() -> None:
    torch.manual_seed(0)
    print("ms         floor    torch  torch, S slots and max baked   triton  triton, S slots  sequences × length, S")
    for count, length, slots in (
        (64, 128, 64),
        (64, 128, 256),
        (64, 128, 1024),
        (16, 512, 64),
        (4, 4096, 64),
        (1, 16384, 16),
    ):
        measure(count, length, slots)


if __name__ == "__main__":
    main()
