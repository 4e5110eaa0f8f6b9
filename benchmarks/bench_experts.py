"""The routed experts with and without LoRA, against torch's grouped products. Needs a CUDA device."""

from __future__ import annotations

import torch
from graph_time import floor_ms, graph_times, refuse_unless

from moelora.backends.base import ExpertSlots, ExpertsWeights, MoeShape
from moelora.capacity import PrefillCapacity
from moelora.types import Phase
from moelora_kernels.ops.experts import MoeBuffers, experts_lora, pick_config
from moelora_kernels.ops.experts.naive import naive_experts
from moelora_kernels.ops.routes import order_tokens

E, K, H, WIDTH, SLOTS, RANK = 128, 8, 2048, 768, 8, 16
"""Qwen3-30B-A3B; eight adapters of rank 16 and the base, requests one behind the other."""
DTYPE = torch.bfloat16


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE).mul_(scale)


def make_slots(in_: int, out: int) -> ExpertSlots:
    return ExpertSlots(
        a_LERI=randn(SLOTS, E, RANK, in_, scale=in_**-0.5),
        b_LEOR=randn(SLOTS, E, out, RANK, scale=0.3),
        ranks_L=torch.full((SLOTS,), RANK, device="cuda", dtype=torch.int32),
    )


def measure(tokens: int, base: ExpertsWeights, up: ExpertSlots, down: ExpertSlots) -> None:
    shape = MoeShape(
        num_experts=E, top_k=K, hidden=H, up_out=2 * WIDTH, inter=WIDTH, max_rank_up=RANK, max_rank_down=RANK
    )
    capacity = PrefillCapacity(max_tokens=tokens, max_requests=64, full_max_requests=64, slots=SLOTS, max_rank=RANK)
    buffers = MoeBuffers(Phase.PREFILL, capacity, torch.device("cuda"), DTYPE, [shape])
    x, logits = randn(tokens, H), torch.randn(tokens, E, device="cuda")
    weights, ids = logits.softmax(-1).topk(K, -1)
    slot = (torch.arange(tokens, device="cuda") // max(1, tokens // 18) % (SLOTS + 1) - 1).int()
    order = order_tokens(slot, buffers=buffers.routes, num_live=None)

    def run(has_lora: bool) -> torch.Tensor:
        return experts_lora(
            x,
            ids,
            weights,
            base,
            up,
            down,
            slot,
            buffers=buffers,
            has_lora=has_lora,
            order_T=order,
        )

    if tokens <= 512:
        expected = naive_experts(x, ids, weights, base, up, down, slot, dtype=torch.float32)
        error = (run(True).float() - expected).norm() / expected.norm()
        refuse_unless(bool(error < 8e-3), "experts")
    rows = x[ids.flatten().argsort() // K]
    h = randn(tokens * K, WIDTH)
    ends = torch.bincount(ids.flatten(), minlength=E).cumsum(0).int()
    product = torch.nn.functional.grouped_mm
    up_T, down_T = base.up.transpose(1, 2), base.down.transpose(1, 2)
    up_peer, down_peer, plain, lora = graph_times(
        [
            lambda: product(rows, up_T, offs=ends),
            lambda: product(h, down_T, offs=ends),
            lambda: run(False),
            lambda: run(True),
        ]
    )
    peer = up_peer + down_peer
    touched = min(E, tokens * K)
    moved = 2.0 * (touched * 3 * WIDTH * H + 2 * tokens * H + 2 * tokens * K * WIDTH)
    floor = floor_ms(num_bytes=moved, flops=2.0 * tokens * K * 3 * WIDTH * H)
    print(
        f"{'':9}{floor:7.3f}{peer:12.3f}{plain:9.3f}{lora:9.3f}{lora / plain:11.3f}{lora / peer:17.3f}{tokens:8} "
        f"tile {pick_config(base, tokens=tokens, top_k=K).block_m}"
    )


def main() -> None:
    torch.manual_seed(0)
    base = ExpertsWeights(
        up=randn(E, 2 * WIDTH, H, scale=H**-0.5),
        down=randn(E, H, WIDTH, scale=WIDTH**-0.5),
        up_bias=None,
        down_bias=None,
        transposed=False,
        gated=True,
        interleaved=False,
        activation=lambda x: torch.nn.functional.silu(x[:, :WIDTH]) * x[:, WIDTH:],
        activation_name="silu",
    )
    up, down = make_slots(H, 2 * WIDTH), make_slots(WIDTH, H)
    print("ms         floor  grouped_mm     base     LoRA  LoRA/base  LoRA/grouped_mm  tokens")
    for tokens in (64, 512, 2048, 8192, 16384):
        measure(tokens, base, up, down)
    print("base and LoRA hold routes, both products, the activation and the sum over K; grouped_mm the products alone")


if __name__ == "__main__":
    main()
