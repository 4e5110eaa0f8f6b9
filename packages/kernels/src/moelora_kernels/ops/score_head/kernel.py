"""Triton kernels of the scoring head: rows × lm_head, reduced per tile of the vocabulary, then over the tiles.

The log-sum-exp is joined from tiles as in an online softmax (arXiv 1805.02867).

Legend: N rows, V vocabulary, H hidden, R rank, C tiles of the vocabulary. Logits live in registers only.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

from moelora_kernels.dot import dot
from moelora_kernels.ops.experts.lora import add_lora_columns, tile_rows
from moelora_kernels.tile_order import place

_NOBODY = tl.constexpr(2147483647)


@triton.jit
def store_tile(
    b_acc,
    b_row,
    m_m,
    i_n,
    p_bias,
    p_target,
    p_logit,
    p_max,
    p_sum,
    p_arg,
    p_top,
    p_top_id,
    vocab,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TOP_K: tl.constexpr,
    BN: tl.constexpr,
):
    """Reduces the products [BM, BN] of rows b_row with the ids of vocabulary tile i_n, and writes what is left."""
    blocks_n = tl.cdiv(vocab, BN)
    o_n = i_n * BN + tl.arange(0, BN)  # [BN]
    m_n = o_n < vocab
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    b_acc *= scale
    if HAS_SOFTCAP:
        # tanh(z) = 1 - 2 / (exp(2z) + 1): right at both ends, where exp gives 0 or infinity.
        b_acc = softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_acc / softcap) + 1.0))
    b_acc = tl.where(m_n[None, :], b_acc, float("-inf"))

    b_at = b_row * blocks_n + i_n  # [BM]
    b_max = tl.max(b_acc, 1)
    # A tile may hold nothing but minus infinity; its sum is then zero, not NaN.
    b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
    tl.store(p_max + b_at, b_max, mask=m_m)
    tl.store(p_sum + b_at, tl.sum(tl.exp(b_acc - b_base[:, None]), 1), mask=m_m)
    b_arg = tl.min(tl.where(b_acc == b_max[:, None], o_n[None, :], _NOBODY), 1)
    tl.store(p_arg + b_at, b_arg, mask=m_m)
    b_target = tl.load(p_target + b_row, mask=m_m, other=-1)
    m_hit = m_m & (b_target >= i_n * BN) & (b_target < tl.minimum(i_n * BN + BN, vocab))
    b_logit = tl.sum(tl.where(o_n[None, :] == b_target[:, None], b_acc, 0.0), 1)
    tl.store(p_logit + b_row, b_logit, mask=m_hit)
    if TOP_K > 0:
        for i_k in range(TOP_K):
            tl.store(p_top + b_at * TOP_K + i_k, b_max, mask=m_m)
            tl.store(p_top_id + b_at * TOP_K + i_k, tl.where(b_max == float("-inf"), -1, b_arg), mask=m_m)
            b_acc = tl.where(o_n[None, :] == b_arg[:, None], float("-inf"), b_acc)
            b_max = tl.max(b_acc, 1)
            b_arg = tl.min(tl.where(b_acc == b_max[:, None], o_n[None, :], _NOBODY), 1)


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def score_tile(
    p_x,
    p_w,
    p_bias,
    p_target,
    p_y,
    p_b,
    p_rank,
    p_tile_pairs,
    p_row_slot,
    p_tile_first,
    p_tile_rows,
    p_tile_slots,
    p_tile_num_slots,
    p_logit,
    p_max,
    p_sum,
    p_arg,
    p_top,
    p_top_id,
    rows,
    row_tiles,
    vocab,
    depth,
    s_x,
    s_w,
    s_b_l,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    SLOT_CAP: tl.constexpr,
    TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
):
    """BM rows × BN ids: writes the tile's maximum, sum of exp(logit - maximum), arg-max and k best `[N, C]`.

    The target's logit `[N]` is written by the tile that holds it. With LoRA, rows come ordered by slot (ops/routes).
    """
    i_n, i_tile = place(tl.program_id(0), tl.cdiv(vocab, BN), row_tiles, GROUP)
    if HAS_LORA:
        tile_size = tl.load(p_tile_rows + i_tile)
        if tile_size == 0:
            return
        b_place, m_m = tile_rows(tl.load(p_tile_first + i_tile), tile_size, BM)  # [BM]
        b_row = tl.load(p_tile_pairs + i_tile * BM + tl.arange(0, BM))
    else:
        o_m = i_tile * BM + tl.arange(0, BM)
        m_m = o_m < rows
        b_row = tl.where(m_m, o_m, i_tile * BM)
        b_place = b_row
    b_row = b_row.to(tl.int64)

    o_n = i_n * BN + tl.arange(0, BN)  # [BN]
    m_n = o_n < vocab
    b_n = tl.where(m_n, o_n, vocab - 1)
    o_k = tl.arange(0, BK)
    p_a = p_x + b_row[:, None] * s_x + o_k[None, :]  # [BM, BK]
    p_wt = p_w + b_n.to(tl.int64)[None, :] * s_w + o_k[:, None]  # [BK, BN]
    b_acc = tl.zeros([BM, BN], tl.float32)
    for o_depth in range(0, depth, BK):
        if EVEN_K:
            b_a = tl.load(p_a)
            b_w = tl.load(p_wt)
        else:
            b_a = tl.load(p_a, mask=o_k[None, :] < depth - o_depth, other=0.0)
            b_w = tl.load(p_wt, mask=o_k[:, None] < depth - o_depth, other=0.0)
        b_acc = dot(b_a, b_w, b_acc)
        p_a += BK
        p_wt += BK
    if HAS_LORA:
        b_acc = add_lora_columns(
            b_acc,
            p_tile_slots + i_tile * SLOT_CAP,
            tl.load(p_tile_num_slots + i_tile),
            p_rank,
            tl.load(p_row_slot + b_place),
            p_y + b_row[:, None] * RP,
            p_b + b_n.to(tl.int64)[None, :] * R,
            s_b_l,
            0,
            R,
            RP,
            SLOT_CAP,
            BR,
            PRECISION,
        )
    store_tile(
        b_acc, b_row, m_m, i_n, p_bias, p_target, p_logit, p_max, p_sum, p_arg, p_top, p_top_id, vocab, scale, softcap,
        HAS_BIAS, HAS_SOFTCAP, TOP_K, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def score_tiles_bulk(
    d_x,
    d_w,
    p_bias,
    p_target,
    p_logit,
    p_max,
    p_sum,
    p_arg,
    p_top,
    p_top_id,
    rows,
    row_tiles,
    vocab,
    depth,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """`score_tile` without LoRA, through tensor descriptors (zero beyond the edges), over a persistent grid.

    One loop of tiles and depth: a tile's first blocks are fetched while the one before is reduced.
    """
    blocks_n = tl.cdiv(vocab, BN)
    for i_work in tl.range(tl.program_id(0), blocks_n * row_tiles, tl.num_programs(0), flatten=FLATTEN):
        i_n, i_tile = place(i_work, blocks_n, row_tiles, GROUP)
        b_acc = tl.zeros([BM, BN], tl.float32)
        for i_k in range(0, depth, BK):
            b_x = d_x.load([i_tile * BM, i_k])
            b_w = d_w.load([i_n * BN, i_k])
            b_acc = dot(b_x, tl.trans(b_w), b_acc)
        b_row = (i_tile * BM + tl.arange(0, BM)).to(tl.int64)  # [BM]
        store_tile(
            b_acc, b_row, b_row < rows, i_n, p_bias, p_target, p_logit, p_max, p_sum, p_arg, p_top, p_top_id, vocab,
            scale, softcap, HAS_BIAS, HAS_SOFTCAP, TOP_K, BN,
        )  # fmt: skip


@triton.jit
def join_tiles(p_max, p_sum, p_arg, p_lse, p_best, p_best_id, blocks_n, BLOCK: tl.constexpr):
    """One row: log-sum-exp, maximum and arg-max over the tiles, in ascending order."""
    i_row = tl.program_id(0).to(tl.int64)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    best_id = tl.full([], _NOBODY, tl.int32)
    for o_block in range(0, blocks_n, BLOCK):
        o_c = o_block + tl.arange(0, BLOCK)  # [BLOCK]
        m_c = o_c < blocks_n
        b_max = tl.load(p_max + i_row * blocks_n + o_c, mask=m_c, other=float("-inf"))
        b_sum = tl.load(p_sum + i_row * blocks_n + o_c, mask=m_c, other=0.0)
        b_arg = tl.load(p_arg + i_row * blocks_n + o_c, mask=m_c, other=_NOBODY)
        here = tl.max(b_max, 0)
        here_id = tl.min(tl.where(b_max == here, b_arg, _NOBODY), 0)
        best_id = tl.where(here > best, here_id, best_id)
        top = tl.maximum(best, here)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(best - base) + tl.sum(b_sum * tl.exp(b_max - base), 0)
        best = top
    tl.store(p_lse + i_row, best + tl.log(total))
    tl.store(p_best + i_row, best)
    tl.store(p_best_id + i_row, tl.where(best_id == _NOBODY, 0, best_id))
