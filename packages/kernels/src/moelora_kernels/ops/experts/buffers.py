"""Scratch of the routed experts: allocated once per phase, sized by capacity, never shared between phases.

Legend: T tokens, K experts per token, R rank, H hidden, I expert width, P pairs (= T·K).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelora.backends.base import MoeShape, PhaseError
from moelora.capacity import PrefillCapacity
from moelora.errors import ConfigError
from moelora.types import Phase
from moelora_kernels.ops.experts.config import WIDE_BLOCKS, WIDEST_BLOCK_K, smallest_block_m
from moelora_kernels.ops.routes import RouteBuffers


def padded_rank(rank: int) -> int:
    """RP: the rank rounded up to 16, the depth of one matrix instruction."""
    return -(-rank // 16) * 16


class MoeBuffers:
    """Scratch for the largest of `shapes` at `capacity`; layers use it one after the other.

    y: A x of either product, `[P, RP]`. wide: A x spread over the columns of a tile's first slots, `[P, 128]`. h: the
    activation's output `[P, I]`. pairs: each pair's output `[P, H]`. Flat, in the
    model's dtype. `block_m`: the smallest tile that will be asked for; None: the smallest that any configuration has.
    """

    def __init__(
        self,
        phase: Phase,
        capacity: PrefillCapacity,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Sequence[MoeShape],
        *,
        block_m: int | None = None,
    ) -> None:
        if not shapes:
            raise ConfigError("expert scratch needs the shape of at least one experts layer")
        tokens, slots = capacity.max_tokens, capacity.slots
        self.phase, self.dtype, self.max_tokens, self.slots = phase, dtype, tokens, slots
        block_m = block_m or smallest_block_m(dtype)

        def flat(*widths: int) -> torch.Tensor:
            return torch.empty(tokens * max(widths), dtype=dtype, device=device)

        self.h = flat(*(s.top_k * s.inter for s in shapes))
        self.pairs = flat(*(s.top_k * s.hidden for s in shapes))
        ranks = ((s.top_k, max(s.max_rank_up, s.max_rank_down)) for s in shapes)
        self.y = flat(*(top_k * padded_rank(rank) if slots else 0 for top_k, rank in ranks))
        self.wide = flat(*(s.top_k * WIDE_BLOCKS * WIDEST_BLOCK_K if slots else 0 for s in shapes))
        self.routes = RouteBuffers(
            max_tokens=tokens,
            top_k=max(s.top_k for s in shapes),
            num_experts=max(s.num_experts for s in shapes),
            num_slots=slots,
            block_m=block_m,
            device=device,
        )
        self.token_routes = RouteBuffers(
            max_tokens=tokens, top_k=1, num_experts=1, num_slots=slots, block_m=block_m, device=device
        )

    def check_phase(self, phase: Phase) -> None:
        """Raises `PhaseError` unless these buffers are those of `phase`."""
        if self.phase is not phase:
            raise PhaseError(
                f"expert scratch of phase {self.phase} was handed to phase {phase}; each phase owns its own"
            )

    def view(self, name: str, rows: int, width: int) -> torch.Tensor:
        """`[rows, width]` at the start of the buffer `name`. Raises `ConfigError` if it is larger than the buffer."""
        flat: torch.Tensor = getattr(self, name)
        if rows * width > flat.numel():
            raise ConfigError(
                f"expert scratch {name!r} holds {flat.numel()} elements, {rows} rows × {width} are needed; "
                "size it with the shapes of all experts layers and the largest batch"
            )
        return flat[: rows * width].view(rows, width)

    @property
    def num_bytes(self) -> int:
        """Device bytes of the floating-point scratch."""
        return sum(t.numel() * t.element_size() for t in (self.h, self.pairs, self.y, self.wide))
