"""Triton kernels of packed causal attention whose grid follows tokens, not sequences × the longest one.

Legend: T tokens, S sequence slots, H query heads, G key and value heads, D head width, Dv value width, M tiles. A tile
holds up to BM queries of one sequence. Keys are walked in blocks that start at the sequence's first token, so a row's
sums do not depend on what else is in the batch. The softmax is summed online (arXiv 1805.02867), as in FlashAttention
(arXiv 2205.14135).
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "sequences"])
def end_tiles(p_cu, p_end, tokens, sequences, BM: tl.constexpr, BLOCK: tl.constexpr):
    """One program: how many tiles end with each sequence; entry S is the padding behind the last boundary."""
    carry = tl.zeros([], tl.int32)
    for o_block in range(0, sequences + 1, BLOCK):
        o_s = o_block + tl.arange(0, BLOCK)  # [BLOCK]
        b_begin = tl.load(p_cu + o_s, mask=o_s <= sequences, other=0)
        b_end = tl.load(p_cu + o_s + 1, mask=o_s < sequences, other=tokens)
        b_tiles = tl.where(o_s <= sequences, (tl.maximum(b_end - b_begin, 0) + BM - 1) // BM, 0)
        tl.store(p_end + o_s, carry + tl.cumsum(b_tiles, 0), mask=o_s <= sequences)
        carry += tl.sum(b_tiles, 0)


@triton.jit(do_not_specialize=["sequences"])
def find_tiles(p_cu, p_tiles_end, p_first, p_begin, p_end, sequences, STEPS: tl.constexpr, BM: tl.constexpr):
    """Writes one tile (the program): its first row, and where its sequence begins (-1: padding) and ends."""
    i_tile = tl.program_id(0)
    low = tl.zeros([], tl.int32)
    high = tl.zeros([], tl.int32) + sequences + 1
    for _ in range(STEPS):
        middle = tl.minimum((low + high) // 2, sequences)
        beyond = tl.load(p_tiles_end + middle) <= i_tile
        searching = low < high
        low = tl.where(searching & beyond, middle + 1, low)
        high = tl.where(searching & (beyond == 0), middle, high)
    safe = tl.minimum(low, sequences)
    before = tl.where(safe > 0, tl.load(p_tiles_end + tl.maximum(safe - 1, 0)), 0)
    begin = tl.load(p_cu + safe)
    tl.store(p_first + i_tile, begin + (i_tile - before) * BM)
    tl.store(p_begin + i_tile, tl.where(low < sequences, begin, -1))
    tl.store(p_end + i_tile, tl.load(p_cu + tl.minimum(safe + 1, sequences)))


@triton.jit(do_not_specialize=["sequences", "rows"])
def zero_tail(p_x, p_cu, sequences, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeroes the rows behind the last boundary, ROWS of them a program; x is contiguous, `[rows, width]`."""
    live = tl.load(p_cu + sequences)
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    m_row = (o_row >= live) & (o_row < rows)
    if (tl.program_id(0) + 1) * ROWS > live:
        for o_block in range(0, width, BLOCK):
            o_x = o_block + tl.arange(0, BLOCK)  # [BLOCK]
            p_rows = p_x + o_row.to(tl.int64)[:, None] * width + o_x[None, :]
            tl.store(
                p_rows, tl.zeros([ROWS, BLOCK], p_x.dtype.element_ty), mask=m_row[:, None] & (o_x < width)[None, :]
            )


@triton.jit
def _walk(
    b_acc,
    b_sum,
    b_max,
    b_q0,
    b_q1,
    p_k,
    p_v,
    o_q,
    first,
    low,
    high,
    end,
    s_k,
    s_v,
    scale,
    softcap,
    window,
    WHOLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The online softmax over the keys `[low, high)`; b_max is kept in units of log 2. scale must be positive.

    WHOLE: all these keys stand before the tile's first query, in whole blocks.
    """
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, D0)
    o_v = tl.arange(0, BV)
    for o_block in range(low, high, BN):
        o_k = o_block + o_n  # [BN]
        m_k = o_k < end
        b_at = o_k.to(tl.int64)
        p_kt = p_k + b_at[None, :] * s_k
        b_k = tl.load(p_kt + o_d[:, None]) if WHOLE else tl.load(p_kt + o_d[:, None], mask=m_k[None, :], other=0.0)
        b_s = tl.dot(b_q0, b_k, input_precision=PRECISION)  # [BM, BN]
        if D1 > 0:
            o_e = D0 + tl.arange(0, D1)
            b_k1 = tl.load(p_kt + o_e[:, None], mask=m_k[None, :] & (o_e[:, None] < D), other=0.0)
            b_s = tl.dot(b_q1, b_k1, b_s, input_precision=PRECISION)
        if HAS_SOFTCAP:
            b_s = softcap * (1.0 - 2.0 / (tl.exp2(b_s * (2.8853900817779268 * scale / softcap)) + 1.0))
            unit = 1.4426950408889634
        else:
            unit = scale * 1.4426950408889634
        if HAS_WINDOW or not WHOLE:
            # Most blocks are seen by all queries of the tile: those need no comparisons.
            partly = o_block + BN > first + 1
            if HAS_WINDOW:
                partly = partly | (o_block + window < first + BM)
            if partly:
                m_s = (o_k[None, :] <= o_q[:, None]) & m_k[None, :]
                if HAS_WINDOW:
                    m_s = m_s & (o_q[:, None] - o_k[None, :] < window)
                b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * unit)
        # A row may have seen no key of its window yet; its maximum is then minus infinity.
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * unit - b_base[:, None])
        b_scale = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_scale + tl.sum(b_p, 1)
        m_v = (o_v < DV)[None, :]
        if not WHOLE:
            m_v = m_v & m_k[:, None]
        b_v = tl.load(p_v + b_at[:, None] * s_v + o_v[None, :], mask=m_v, other=0.0)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_sum, b_max


@triton.jit(do_not_specialize=["tokens"])
def attend(
    p_q,
    p_k,
    p_v,
    p_sink,
    p_out,
    p_first,
    p_begin,
    p_end,
    p_live,
    tokens,
    s_q_t,
    s_q_h,
    s_k_t,
    s_k_h,
    s_v_t,
    s_v_h,
    s_out_t,
    s_out_h,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One live tile and one head at a time. D0 + D1 ≥ D: the head width as two powers of two.

    SPLIT: keys before the tile are walked apart from those beside it, in a loop without masks: fewer registers and
    comparisons a step, but the second loop waits for its first keys. The sums are the same, bit for bit.
    """
    live = tl.load(p_live)
    # Most batches have no more live tiles than there are programs, so that the hardware deals them out; the loop is for
    # batches of very many short sequences, whose empty slots would otherwise each cost a program.
    for i_work in tl.range(tl.program_id(0), live * HEADS, tl.num_programs(0), num_stages=1):
        # Later tiles of a sequence meet more keys: start with them, so that no long one is left for the end.
        i_tile = live - 1 - i_work // HEADS
        i_h = i_work % HEADS
        first = tl.load(p_first + i_tile)
        begin = tl.load(p_begin + i_tile)
        end = tl.load(p_end + i_tile)
        o_q = first + tl.arange(0, BM)  # [BM]
        o_v = tl.arange(0, BV)
        p_o = p_out + o_q.to(tl.int64)[:, None] * s_out_t + i_h * s_out_h + o_v[None, :]
        if begin < 0:
            m_pad = (o_q < tokens)[:, None] & (o_v < DV)[None, :]
            tl.store(p_o, tl.zeros([BM, BV], p_out.dtype.element_ty), mask=m_pad)
        else:
            m_q = o_q < end
            o_d = tl.arange(0, D0)
            p_qt = p_q + o_q.to(tl.int64)[:, None] * s_q_t + i_h * s_q_h
            b_q0 = tl.load(p_qt + o_d[None, :], mask=m_q[:, None], other=0.0)  # [BM, D0]
            b_q1 = b_q0
            if D1 > 0:
                o_e = D0 + tl.arange(0, D1)
                b_q1 = tl.load(p_qt + o_e[None, :], mask=m_q[:, None] & (o_e < D)[None, :], other=0.0)  # [BM, D1]
            p_kh = p_k + (i_h // REPEAT) * s_k_h
            p_vh = p_v + (i_h // REPEAT) * s_v_h
            b_max = tl.full([BM], float("-inf"), tl.float32)
            b_sum = tl.zeros([BM], tl.float32)
            b_acc = tl.zeros([BM, BV], tl.float32)
            low = begin
            if HAS_WINDOW:
                low = begin + tl.maximum(first - window + 1 - begin, 0) // BN * BN
            high = tl.minimum(first + BM, end)
            if SPLIT:
                diagonal = begin + (first - begin) // BN * BN
                b_acc, b_sum, b_max = _walk(
                    b_acc, b_sum, b_max, b_q0, b_q1, p_kh, p_vh, o_q, first, low, diagonal, end, s_k_t, s_v_t, scale,
                    softcap, window, True, HAS_WINDOW, HAS_SOFTCAP, D, D0, D1, DV, BV, PRECISION, BM, BN,
                )  # fmt: skip
                low = diagonal
            b_acc, b_sum, b_max = _walk(
                b_acc, b_sum, b_max, b_q0, b_q1, p_kh, p_vh, o_q, first, low, high, end, s_k_t, s_v_t, scale,
                softcap, window, False, HAS_WINDOW, HAS_SOFTCAP, D, D0, D1, DV, BV, PRECISION, BM, BN,
            )  # fmt: skip
            if HAS_SINKS:
                sink = tl.load(p_sink + i_h).to(tl.float32) * 1.4426950408889634
                b_new = tl.maximum(b_max, sink)
                b_scale = tl.exp2(b_max - b_new)
                b_sum = b_sum * b_scale + tl.exp2(sink - b_new)
                b_acc *= b_scale[:, None]
            b_out = b_acc / b_sum[:, None]
            tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_q[:, None] & (o_v < DV)[None, :])
