"""The scoring head against logits in chunks (torch.mm, then a log-softmax). Needs a CUDA device."""

from __future__ import annotations

import torch
from graph_time import floor_ms, graph_time, refuse_unless

from moelora.backends.base import DenseSlots
from moelora_kernels.ops.score_head import score_rows

V, H, SLOTS, RANK, CHUNK = 151_936, 2048, 8, 16, 2048


def measure(rows: int, w: torch.Tensor, slots: DenseSlots) -> None:
    x = torch.randn(rows, H, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, V, (rows,), device="cuda")
    slot = (torch.arange(rows, device="cuda") * (SLOTS + 1) // rows - 1).int()

    def chunked() -> torch.Tensor:
        parts = []
        for begin in range(0, rows, CHUNK):
            logits = (x[begin : begin + CHUNK] @ w.T).float()
            at = targets[begin : begin + CHUNK, None]
            parts.append(logits.gather(1, at)[:, 0] - logits.logsumexp(-1))
        return torch.cat(parts)

    error = (score_rows(x, w, targets).target_logprob - chunked()).abs().max()
    refuse_unless(bool(error < 0.05), "score_head")
    floor = floor_ms(num_bytes=2.0 * (V * H + rows * H), flops=2.0 * rows * V * H)
    copies = 1 if rows > 1024 else 4
    plain = graph_time(lambda: score_rows(x, w, targets), copies=copies)
    lora = graph_time(lambda: score_rows(x, w, targets, slots=slots, row_slot_N=slot), copies=copies)
    top = graph_time(lambda: score_rows(x, w, targets, top_k=8), copies=copies) if rows <= 1024 else float("nan")
    peer = graph_time(chunked, copies=copies)
    print(f"{'':9}{floor:7.3f}{peer:9.3f}{plain:9.3f}{lora:9.3f}{top:9.3f}  {rows}")


def main() -> None:
    torch.manual_seed(0)
    w = torch.randn(V, H, device="cuda", dtype=torch.bfloat16).mul_(H**-0.5)
    slots = DenseSlots(
        a_LRI=torch.randn(SLOTS, RANK, H, device="cuda", dtype=torch.bfloat16).mul_(H**-0.5),
        b_LOR=torch.randn(SLOTS, V, RANK, device="cuda", dtype=torch.bfloat16).mul_(0.2),
        ranks_L=torch.full((SLOTS,), RANK, device="cuda", dtype=torch.int32),
    )
    print("ms         floor  chunked     base     LoRA    top 8  rows")
    for rows in (1, 64, 1024, 8192):
        measure(rows, w, slots)


if __name__ == "__main__":
    main()
