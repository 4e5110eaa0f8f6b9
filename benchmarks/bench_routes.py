"""The routes of one layer, against a sort in plain torch. Needs a CUDA device."""

from __future__ import annotations

import torch
from graph_time import floor_ms, graph_time, refuse_unless

from moelora_kernels.ops.routes import RouteBuffers, build_routes, order_tokens
from moelora_kernels.ops.routes.naive import naive_order

SLOTS = 8


def measure(tokens: int, K: int, E: int) -> None:
    ids = torch.rand(tokens, E, device="cuda").topk(K, -1).indices
    slot = torch.randint(-1, SLOTS, (tokens,), device="cuda", dtype=torch.int32)
    buffers = RouteBuffers(
        max_tokens=tokens, top_k=K, num_experts=E, num_slots=SLOTS, block_m=64, device=torch.device("cuda")
    )
    order = order_tokens(slot, buffers=buffers, num_live=None)

    def run():  # type: ignore[no-untyped-def]
        return build_routes(
            ids,
            slot,
            num_experts=E,
            block_m=128,
            has_lora=True,
            buffers=buffers,
            order_T=order,
        )

    expected, _ = naive_order(ids.cpu(), slot.cpu(), E, SLOTS, tokens)
    refuse_unless(run().sorted_P.tolist() == expected.tolist(), "routes")
    key = ids * (SLOTS + 1) + slot[:, None] + 1
    plain = graph_time(lambda: key.flatten().sort(stable=True))
    first = graph_time(lambda: order_tokens(slot, buffers=buffers, num_live=None))
    floor = floor_ms(num_bytes=tokens * K * 16.0, flops=0)
    print(f"{'':9}{floor:7.4f}{plain:12.4f}{graph_time(run):9.4f}{first:9.4f}  {tokens} × {K} of {E}")


def main() -> None:
    print("ms         floor  torch.sort   routes    order  tokens × K of E")
    for tokens, K, E in ((512, 8, 128), (8192, 8, 128), (16384, 8, 128), (16384, 8, 512), (16384, 2, 8)):
        measure(tokens, K, E)


if __name__ == "__main__":
    main()
