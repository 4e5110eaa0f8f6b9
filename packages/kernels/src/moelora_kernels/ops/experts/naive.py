"""The routed experts with LoRA in plain torch, one (expert, slot) group at a time: the ground truth.

Legend: T tokens, K experts per token, E experts, L adapter slots, R rank, H hidden, I expert width, P pairs (= T·K).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from moelora.backends.base import ExpertSlots, ExpertsWeights


def naive_activation(base: ExpertsWeights, up: torch.Tensor) -> torch.Tensor:
    """`[P, up_out]` → `[P, I]` by the activation's name, in the dtype of `up`; the callable where it has no name."""
    name = base.activation_name
    if name is None:
        return base.activation(up)
    if name == "gpt_oss":
        limit = float("inf") if base.limit is None else base.limit
        gate, value = up[..., ::2].clamp(max=limit), up[..., 1::2].clamp(-limit, limit)
        return (value + 1) * gate * torch.sigmoid(gate * (1.702 if base.alpha is None else base.alpha))
    acts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: functional.relu(x).square(),
    }
    act = acts[name]
    if not base.gated:
        return act(up)
    gate, value = (up[..., ::2], up[..., 1::2]) if base.interleaved else up.chunk(2, dim=-1)
    return act(gate) * value


def _project(
    x_NI: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: ExpertSlots | None,
    expert: int,
    slot: int,
    transposed: bool,
) -> torch.Tensor:
    dtype = x_NI.dtype
    w_OI = weight[expert].to(dtype)
    out_NO = x_NI @ (w_OI if transposed else w_OI.T)
    if bias is not None:
        out_NO = out_NO + bias[expert].to(dtype)
    if slots is not None and slot >= 0:
        rank = int(slots.ranks_L[slot])
        a_RI = slots.a_LERI[slot, expert if slots.a_LERI.shape[1] > 1 else 0, :rank].to(dtype)
        b_OR = slots.b_LEOR[slot, expert if slots.b_LEOR.shape[1] > 1 else 0, :, :rank].to(dtype)
        out_NO = out_NO + (x_NI @ a_RI.T) @ b_OR.T
    return out_NO


def naive_experts(
    x_TH: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    base: ExpertsWeights,
    up_slots: ExpertSlots | None,
    down_slots: ExpertSlots | None,
    token_slot_T: torch.Tensor,
    *,
    num_live: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Σ_k w_k · (W₂h + B₂A₂h), h = act(W₁x + B₁A₁x), computed in `dtype`. Pairs without an expert add nothing."""
    T, K = expert_ids_TK.shape
    E = base.num_experts
    live = T if num_live is None else num_live
    width = base.down.shape[2] if base.transposed else base.down.shape[1]
    out_TKH = torch.zeros(T, K, width, dtype=dtype, device=x_TH.device)
    x_TH = x_TH.to(dtype)
    slot_TK = token_slot_T.long()[:, None].expand(T, K)
    for expert in range(E):
        for slot in slot_TK.unique().tolist():
            chosen = (expert_ids_TK == expert) & (slot_TK == slot)
            chosen[live:] = False
            rows = chosen.nonzero()
            if not len(rows):
                continue
            up = _project(x_TH[rows[:, 0]], base.up, base.up_bias, up_slots, expert, slot, base.transposed)
            h = naive_activation(base, up)
            down = _project(h, base.down, base.down_bias, down_slots, expert, slot, base.transposed)
            if base.post_norm is not None:
                down = base.post_norm(down)
            out_TKH[rows[:, 0], rows[:, 1]] = down.to(dtype)
    return (out_TKH * weights_TK.to(dtype)[:, :, None]).sum(1)
