"""Triton kernels around the experts' products: A x of each row's own slot before them, the sum over K behind them.

Legend: T tokens, K experts per token, E experts, R rank (RP: rounded up to 16), H hidden, P pairs (= T·K).
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

from moelora_kernels.ops.experts.lora import column_slots, lora_columns, tile_rows


@triton.jit
def shrink(
    p_x,
    p_a,
    p_rank,
    p_y,
    p_wide,
    p_tile_expert,
    p_tile_first,
    p_tile_rows,
    p_tile_pairs,
    p_tile_row_slots,
    p_tile_slots,
    p_tile_num_slots,
    K,
    depth,
    s_x,
    s_a_l,
    s_a_e,
    s_a_r,
    col_blocks,
    GATHER: tl.constexpr,
    Y_BY_TOKEN: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    SLOT_CAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """y = A x for one tile, each row with its own slot's A, in passes of BC of the tile's LoRA columns.

    The first WIDE passes write all their columns to wide `[P, WIDE·BC]`, zeros where they are another slot's; the
    others write a row's own columns to y `[P or T, RP]`.
    """
    i_tile = tl.program_id(0) // col_blocks
    i_c = tl.program_id(0) % col_blocks
    p_slots = p_tile_slots + i_tile * SLOT_CAP
    # All loaded before the first of them is looked at: one latency instead of several.
    expert = tl.load(p_tile_expert + i_tile)
    num_slots = tl.load(p_tile_num_slots + i_tile)
    rows = tl.load(p_tile_rows + i_tile)
    first = tl.load(p_tile_first + i_tile)
    b_pair = tl.load(p_tile_pairs + i_tile * BM + tl.arange(0, BM))  # [BM]
    b_row_slot = tl.load(p_tile_row_slots + i_tile * BM + tl.arange(0, BM))  # [BM]
    b_first_slot = column_slots(p_slots, i_c * BC + tl.arange(0, BC), RP, SLOT_CAP)  # [BC]
    if (expert < 0) | (i_c * BC >= num_slots * RP):
        return
    b_row, m_m = tile_rows(first, rows, BM)  # [BM]
    b_token = b_pair // K
    o_k = tl.arange(0, BK)
    # Rows of the base and those behind the tile's end are not read: L2, which rows come out of, is what limits this.
    m_x = b_row_slot >= 0
    b_x = b_token if GATHER else b_row
    p_xt = p_x + b_x.to(tl.int64)[:, None] * s_x + o_k[None, :]  # [BM, BK]
    b_y_to = (b_token if Y_BY_TOKEN else b_row).to(tl.int64)[:, None] * RP
    for o_c in range(i_c * BC, num_slots * RP, col_blocks * BC):
        o_cc = o_c + tl.arange(0, BC)  # [BC]
        b_slot = b_first_slot
        if o_c > i_c * BC:
            b_slot = column_slots(p_slots, o_cc, RP, SLOT_CAP)
        b_r, m_c = lora_columns(b_slot, p_rank, o_cc, num_slots, RP)
        m_c = m_c & (o_cc < num_slots * RP)
        used = tl.sum(m_c.to(tl.int32), 0)
        if WIDE > 0:
            used = tl.where(o_c < WIDE * BC, 1, used)
        if used > 0:
            # Columns beyond the rank and those of no slot are not read: their zeros cost no bandwidth. Where all ranks
            # fit into 16 columns, the bank's own zeros do for a slot of lower rank: waiting for its rank costs more.
            rank = tl.load(p_rank + b_slot) if RP > 16 else tl.full(b_r.shape, R, tl.int32)
            m_r = m_c & (b_r < rank)
            b_at = b_slot.to(tl.int64) * s_a_l + tl.where(m_r, b_r, 0) * s_a_r + expert.to(tl.int64) * s_a_e
            p_at = p_a + b_at[None, :] + o_k[:, None]  # [BK, BC]
            p_xk = p_xt
            b_acc = tl.zeros([BM, BC], tl.float32)
            for o_depth in range(0, depth, BK):
                if EVEN_K:
                    b_xk = tl.load(p_xk, mask=m_x[:, None], other=0.0)
                    b_ak = tl.load(p_at, mask=m_r[None, :], other=0.0)
                else:
                    b_xk = tl.load(p_xk, mask=m_x[:, None] & (o_k[None, :] < depth - o_depth), other=0.0)
                    b_ak = tl.load(p_at, mask=m_r[None, :] & (o_k[:, None] < depth - o_depth), other=0.0)
                b_acc = tl.dot(b_xk, b_ak.to(b_xk.dtype), b_acc, input_precision=PRECISION)
                p_xk += BK
                p_at += BK
            m_own = m_c[None, :] & (b_row_slot[:, None] == b_slot[None, :])
            b_out = tl.where(m_own & m_r[None, :], b_acc, 0.0).to(p_y.dtype.element_ty)
            if WIDE > 0:
                wide = o_c < WIDE * BC
                p_to = tl.where(wide, p_wide, p_y) + b_row.to(tl.int64)[:, None] * tl.where(wide, WIDE * BC, RP)
                m_to = m_own | (o_cc < tl.where(wide, WIDE * BC, 0))[None, :]
                tl.store(p_to + tl.where(wide, o_cc, b_r)[None, :], b_out, mask=m_m[:, None] & m_to)
            else:
                tl.store(p_y + b_y_to + b_r[None, :], b_out, mask=m_m[:, None] & m_own)


@triton.jit(do_not_specialize=["tokens", "experts"])
def combine(
    p_pairs,
    p_ids,
    p_weights,
    p_live,
    p_out,
    tokens,
    experts,
    width,
    s_pairs,
    s_out,
    s_weights_t,
    s_weights_k,
    HAS_LIVE: tl.constexpr,
    K: tl.constexpr,
    BH: tl.constexpr,
):
    """out[t] = Σ_k weight[t, k] · pairs[t·K + k] in fp32, k ascending; pairs without an expert are not read."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)  # [BH]
    m_h = o_h < width
    live = tokens
    if HAS_LIVE:
        live = tl.load(p_live).to(tl.int32)
    b_acc = tl.zeros([BH], tl.float32)
    for i_k in tl.static_range(K):
        expert = tl.load(p_ids + i_t * K + i_k)
        alive = (expert >= 0) & (expert < experts) & (i_t < live)
        weight = tl.load(p_weights + i_t * s_weights_t + i_k * s_weights_k).to(tl.float32)
        m_k = o_h < tl.where(alive, width, 0)
        b_pair = tl.load(p_pairs + (i_t * K + i_k) * s_pairs + o_h, mask=m_k, other=0.0).to(tl.float32)
        b_acc += tl.where(alive, weight, 0.0) * b_pair
    tl.store(p_out + i_t * s_out + o_h, b_acc.to(p_out.dtype.element_ty), mask=m_h)
