"""Routes on the device: a stable counting sort of pairs by (expert, slot), and the tile list that follows from it.

Legend: T tokens, K experts per token, E experts, L adapter slots, P pairs (= T·K). Integers only, fixed grids, no
atomics: the order is the same on every run. The sort has two levels. Tokens are ordered by slot first (once per batch),
then their pairs, taken in that order, by expert. One level is four steps: counts per bin and block of elements, their
running sum over blocks, the first row of each bin, a scatter. The last bin takes what no expert computes.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit
def _keys(o_i, p_ids, p_slot, p_order, live, count, K, last, num_slots, PAIRS: tl.constexpr, HAS_SLOT: tl.constexpr):
    """The bin of each element (`last` for the dead, -1 beyond the end), its pair or token id, and its slot."""
    m_i = o_i < count
    b_slot = tl.full(o_i.shape, -1, tl.int32)
    if PAIRS:
        b_token = o_i // K
        if HAS_SLOT:
            b_token = tl.load(p_order + b_token, mask=m_i, other=0)
            b_slot = tl.load(p_slot + b_token, mask=m_i, other=-1)
        b_item = b_token * K + o_i % K
        b_key = tl.load(p_ids + b_item, mask=m_i, other=-1)
    else:
        b_token = o_i
        b_item = o_i
        b_slot = tl.load(p_slot + o_i, mask=m_i, other=-1)
        b_key = b_slot + 1
    m_alive = (b_key >= 0) & (b_key < last) & (b_token < live) & (b_slot >= -1) & (b_slot < num_slots)
    b_key = tl.where(m_alive, b_key, last).to(tl.int32)
    return tl.where(m_i, b_key, -1), b_item, b_slot


@triton.jit
def _live(p_live, count, HAS_LIVE: tl.constexpr):
    """How many tokens are live."""
    live = count
    if HAS_LIVE:
        live = tl.load(p_live).to(tl.int32)
    return live


@triton.jit(do_not_specialize=["count", "tokens", "blocks"])
def count_bins(
    p_ids,
    p_slot,
    p_order,
    p_live,
    p_count,
    count,
    tokens,
    blocks,
    K,
    last,
    num_slots,
    PAIRS: tl.constexpr,
    HAS_SLOT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Writes count `[bin, block]`, int32. Grid: blocks of BLOCK elements × blocks of BINS bins."""
    i_block = tl.program_id(0)
    live = _live(p_live, tokens, HAS_LIVE)
    o_bin = tl.program_id(1) * BINS + tl.arange(0, BINS)  # [BINS]
    o_i = i_block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b_key, _, _ = _keys(o_i, p_ids, p_slot, p_order, live, count, K, last, num_slots, PAIRS, HAS_SLOT)
    b_count = tl.sum((b_key[:, None] == o_bin[None, :]).to(tl.int32), 0)
    tl.store(p_count + o_bin * blocks + i_block, b_count, mask=o_bin <= last)


@triton.jit(do_not_specialize=["blocks"])
def sum_blocks(p_count, p_total, blocks, BLOCK: tl.constexpr):
    """Turns the counts of one bin (the program) into their exclusive sum over blocks, in place; writes the total."""
    i_bin = tl.program_id(0)
    carry = tl.zeros([], tl.int32)
    for o_block in range(0, blocks, BLOCK):
        o_b = o_block + tl.arange(0, BLOCK)  # [BLOCK]
        m_b = o_b < blocks
        b_count = tl.load(p_count + i_bin * blocks + o_b, mask=m_b, other=0)
        tl.store(p_count + i_bin * blocks + o_b, carry + tl.cumsum(b_count, 0) - b_count, mask=m_b)
        carry += tl.sum(b_count, 0)
    tl.store(p_total + i_bin, carry)


@triton.jit
def start_bins(p_total, p_start, p_tile_end, last, BLOCK_M: tl.constexpr, BINS: tl.constexpr):
    """One program: the first row of each bin, and how many tiles of BLOCK_M rows end with it (exclusive of `last`)."""
    o_bin = tl.arange(0, BINS)  # [BINS]
    b_total = tl.load(p_total + o_bin, mask=o_bin <= last, other=0)
    tl.store(p_start + o_bin, tl.cumsum(b_total, 0) - b_total, mask=o_bin <= last)
    b_tiles = tl.where(o_bin < last, (b_total + BLOCK_M - 1) // BLOCK_M, 0)
    tl.store(p_tile_end + o_bin, tl.cumsum(b_tiles, 0), mask=o_bin < last)


@triton.jit(do_not_specialize=["count", "tokens", "blocks"])
def scatter_items(
    p_ids,
    p_slot,
    p_order,
    p_live,
    p_count,
    p_start,
    p_sorted,
    p_row_slot,
    count,
    tokens,
    blocks,
    K,
    last,
    num_slots,
    PAIRS: tl.constexpr,
    HAS_SLOT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes each item and its slot to its row: start of its bin + earlier blocks + earlier items of this block."""
    i_block = tl.program_id(0)
    live = _live(p_live, tokens, HAS_LIVE)
    o_i = i_block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b_key, b_item, b_slot = _keys(o_i, p_ids, p_slot, p_order, live, count, K, last, num_slots, PAIRS, HAS_SLOT)
    m_before = (b_key[None, :] == b_key[:, None]) & (o_i[None, :] < o_i[:, None])  # [BLOCK, BLOCK]
    m_i = o_i < count
    b_row = tl.load(p_start + b_key, mask=m_i, other=0) + tl.sum(m_before.to(tl.int32), 1)
    b_row += tl.load(p_count + b_key * blocks + i_block, mask=m_i, other=0)
    tl.store(p_sorted + b_row, b_item, mask=m_i)
    tl.store(p_row_slot + b_row, b_slot, mask=m_i)


@triton.jit
def list_tiles(
    p_total,
    p_start,
    p_tile_end,
    p_sorted,
    p_row_slot,
    p_expert,
    p_first,
    p_rows,
    p_pairs,
    p_row_slots,
    p_slots,
    p_num_slots,
    last,
    HAS_SLOT: tl.constexpr,
    SLOT_CAP: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
):
    """Writes one tile (the program): expert or -1, first row, rows, their pairs and slots, adapter slots present.

    Slots present ascend, then come zeros. Behind its last row a tile repeats the pair of the first, under slot -1.
    """
    i_tile = tl.program_id(0)
    o_bin = tl.arange(0, BINS)  # [BINS]
    b_end = tl.load(p_tile_end + o_bin, mask=o_bin < last, other=2147483647)
    expert = tl.sum((b_end <= i_tile).to(tl.int32), 0)
    used = expert < last
    safe = tl.minimum(expert, last - 1)
    begin = tl.where(safe > 0, tl.load(p_tile_end + tl.maximum(safe - 1, 0)), 0)
    offset = (i_tile - begin) * BLOCK_M
    first = tl.load(p_start + safe) + offset
    rows = tl.where(used, tl.minimum(tl.load(p_total + safe) - offset, BLOCK_M), 0)
    tl.store(p_expert + i_tile, tl.where(used, expert, -1))
    tl.store(p_first + i_tile, tl.where(used, first, 0))
    tl.store(p_rows + i_tile, rows)
    o_r = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    if used:
        b_pair = tl.load(p_sorted + first + tl.where(o_r < rows, o_r, 0))
        tl.store(p_pairs + i_tile * BLOCK_M + o_r, b_pair)
    if HAS_SLOT:
        b_slot = tl.load(p_row_slot + first + o_r, mask=o_r < rows, other=-1)
        b_previous = tl.load(p_row_slot + first + o_r - 1, mask=(o_r < rows) & (o_r > 0), other=-1)
        tl.store(p_row_slots + i_tile * BLOCK_M + o_r, b_slot)
        m_new = (b_slot >= 0) & (b_slot != b_previous)
        b_at = tl.cumsum(m_new.to(tl.int32), 0) - 1
        tl.store(p_slots + i_tile * SLOT_CAP + b_at, b_slot, mask=m_new)
        num_slots = tl.sum(m_new.to(tl.int32), 0)
        tl.store(p_num_slots + i_tile, num_slots)
        o_s = tl.arange(0, SLOT_BLOCK)
        tl.store(p_slots + i_tile * SLOT_CAP + o_s, 0, mask=(o_s >= num_slots) & (o_s < SLOT_CAP))
