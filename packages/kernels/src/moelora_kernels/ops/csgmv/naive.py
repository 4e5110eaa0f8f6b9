"""The chunks of csgmv in plain Python: the truth for its permutation and its segment list."""

from __future__ import annotations


def naive_chunks(slots: list[int], chunk_rows: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The permutation of all rows, and the chunks as (start, rows, slot) in sorted order. Base rows are in no chunk."""
    perm = sorted(range(len(slots)), key=lambda row: (slots[row] < 0, slots[row]))
    chunks: list[tuple[int, int, int]] = []
    for position, row in enumerate(perm):
        slot = slots[row]
        if slot < 0:
            break
        if chunks and chunks[-1][2] == slot and chunks[-1][1] < chunk_rows:
            start, rows, _ = chunks[-1]
            chunks[-1] = (start, rows + 1, slot)
        else:
            chunks.append((position, 1, slot))
    return perm, chunks
