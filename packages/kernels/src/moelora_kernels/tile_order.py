"""The order in which the programs of a product walk through its tiles. Device functions only."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(i_work, tiles_a, tiles_b, GROUP: tl.constexpr):
    """The tile of a piece of work, as its places in a and in b; there are tiles_a · tiles_b pieces.

    Neighbours take GROUP tiles of a for each tile of b, so that what belongs to either is read from L2.
    """
    per_group = GROUP * tiles_b
    first_a = i_work // per_group * GROUP
    height = tl.minimum(tiles_a - first_a, GROUP)
    return first_a + i_work % per_group % height, i_work % per_group // height
