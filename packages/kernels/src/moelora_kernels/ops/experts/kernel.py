"""Triton kernel of the routed experts: the grouped product with its LoRA and its activation inside.

Legend: T tokens, K experts per token, E experts, L adapter slots, R rank, H hidden, I expert width, P pairs (= T·K).
Rows are pairs ordered by (expert, slot); a tile holds rows of one expert and lists the slots it meets (ops/routes).
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

from moelora_kernels.ops.experts.lora import add_lora_columns, factor_offsets, tile_rows
from moelora_kernels.tile_order import place


@triton.jit
def activate(x, ACT: tl.constexpr):
    """silu (1), gelu with tanh (2), gelu (3), squared relu (4), in fp32."""
    if ACT == 1:
        return x * tl.sigmoid(x)
    elif ACT == 2:
        # tanh(z) = 2·sigmoid(2z) - 1, so 0.5·(1 + tanh(z)) = sigmoid(2z) with z = sqrt(2/pi)·(x + 0.044715·x³).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == 3:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        b = tl.maximum(x, 0.0)
        return b * b


@triton.jit
def activate_gated(gate, up, limit, alpha, ACT: tl.constexpr):
    """act(gate) · up; 5: clamped gate · sigmoid(alpha · gate) · (clamped up + 1)."""
    if ACT == 5:
        b_gate = tl.minimum(gate, limit)
        b_up = tl.minimum(tl.maximum(up, -limit), limit)
        return (b_up + 1.0) * b_gate * tl.sigmoid(alpha * b_gate)
    else:
        return activate(gate, ACT) * up


@triton.jit
def product_tile(
    expert,
    i_tile,
    i_n,
    first,
    rows,
    b_pair,
    num_slots,
    b_kb,
    b_kb1,
    p_x,
    p_w,
    p_bias,
    p_y,
    p_wide,
    p_b,
    p_rank,
    p_out,
    p_row_slot,
    p_tile_slots,
    K,
    n_cols,
    depth,
    half,
    s_x,
    s_w_e,
    s_w_n,
    s_w_k,
    s_b_l,
    s_b_e,
    s_out,
    limit,
    alpha,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    HALVES: tl.constexpr,
    COLUMN_RUNS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    Y_BY_TOKEN: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    SLOT_CAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """One tile of `grouped_product`, of BM rows, whose pairs are b_pair; b_kb, b_kb1 `[BK]`: see `factor_offsets`."""
    b_row, m_m = tile_rows(first, rows, BM)  # [BM]
    b_token = b_pair // K
    b_x = b_token if GATHER else b_row
    o_k = tl.arange(0, BK)
    o_n = i_n * BN + tl.arange(0, BN)  # [BN]
    if COLUMN_RUNS:
        # Where columns lie side by side, those behind the last must too, or every load falls apart into elements.
        b_n = tl.max_contiguous(tl.multiple_of(tl.where(o_n < n_cols, o_n, o_n % 16), 16), 16)
    else:
        b_n = tl.minimum(o_n, n_cols - 1)
    if HALVES == 1:
        b_n = (b_n % 2) * half + b_n // 2
    p_we = p_w + expert.to(tl.int64) * s_w_e
    p_be = p_b + expert.to(tl.int64) * s_b_e
    p_slots = p_tile_slots + i_tile * SLOT_CAP
    b_acc = tl.zeros([BM, BN], tl.float32)
    # Addresses are made anew in each step, from 32 bits where they suffice: faster here than moving pointers on.
    steps = tl.cdiv(depth, BK)
    lora_steps = 0
    if WIDE > 0:
        # The first WIDE·BK LoRA columns are further steps of the main loop, so that they cost a step each and no more:
        # y stands there spread out, zeros in other slots' columns, and only addresses change.
        lora_steps = tl.minimum(tl.cdiv(num_slots * RP, BK), WIDE)
    for i_k in range(steps + lora_steps):
        if WIDE > 0:
            lora = i_k >= steps
            o_depth = tl.where(lora, i_k - steps, i_k) * BK
            # Row and stride are chosen apart: the compiler sees a product's divisor, not that of a choice of products.
            b_at = tl.where(lora, b_row, b_x).to(OFFSET) * tl.where(lora, WIDE * BK, s_x) + o_depth  # [BM]
            p_a = tl.where(lora, p_wide, p_x) + (b_at[:, None] + o_k[None, :])  # [BM, BK]
            b_kw = tl.where(lora, tl.where(i_k == steps, b_kb, b_kb1), (o_depth + o_k) * s_w_k)
            p_wt = tl.where(lora, p_be, p_we) + (b_n[None, :] * tl.where(lora, R, s_w_n) + b_kw[:, None])  # [BK, BN]
        else:
            o_depth = i_k * BK
            p_a = p_x + ((b_x.to(OFFSET) * s_x + o_depth)[:, None] + o_k[None, :])  # [BM, BK]
            p_wt = p_we + (b_n[None, :] * s_w_n + ((o_depth + o_k) * s_w_k)[:, None])  # [BK, BN]
        if EVEN_K:
            b_acc = tl.dot(tl.load(p_a), tl.load(p_wt), b_acc, input_precision=PRECISION)
        else:
            b_a = tl.load(p_a, mask=o_k[None, :] < depth - o_depth, other=0.0)
            b_w = tl.load(p_wt, mask=o_k[:, None] < depth - o_depth, other=0.0)
            b_acc = tl.dot(b_a, b_w, b_acc, input_precision=PRECISION)
    if HAS_LORA:
        done: tl.constexpr = WIDE * BK
        # Known when compiled, where a tile cannot meet more: a second loop behind the first costs even unused.
        if done < SLOT_CAP * RP and num_slots * RP > done:
            p_yt = p_y + (b_token if Y_BY_TOKEN else b_row).to(tl.int64)[:, None] * RP
            p_bt = p_be + b_n[None, :] * R
            b_row_slot = tl.load(p_row_slot + b_row)  # [BM]
            b_acc = add_lora_columns(
                b_acc, p_slots, num_slots, p_rank, b_row_slot, p_yt, p_bt, s_b_l, done, R, RP, SLOT_CAP, BR, PRECISION
            )
    if HAS_BIAS:
        b_acc += tl.load(p_bias + expert.to(tl.int64) * n_cols + b_n).to(tl.float32)[None, :]
    b_to = (b_pair if SCATTER else b_row).to(tl.int64)[:, None] * s_out
    if HALVES == 0:
        b_out = b_acc if ACT == 0 else activate(b_acc, ACT)
        m_o = m_m[:, None] & (o_n < n_cols)[None, :]
        tl.store(p_out + b_to + o_n[None, :], b_out.to(p_out.dtype.element_ty), mask=m_o)
    else:
        b_gate, b_up = tl.split(tl.reshape(b_acc, [BM, BN // 2, 2]))  # [BM, BN/2]
        b_out = activate_gated(b_gate, b_up, limit, alpha, ACT)
        o_i = i_n * (BN // 2) + tl.arange(0, BN // 2)
        m_o = m_m[:, None] & (o_i < n_cols // 2)[None, :]
        tl.store(p_out + b_to + o_i[None, :], b_out.to(p_out.dtype.element_ty), mask=m_o)


@triton.jit(do_not_specialize=["tiles"])
def grouped_product(
    p_x,
    p_w,
    p_bias,
    p_y,
    p_wide,
    p_b,
    p_rank,
    p_out,
    p_row_slot,
    p_tile_expert,
    p_tile_first,
    p_tile_rows,
    p_tile_pairs,
    p_tile_slots,
    p_tile_num_slots,
    tiles,
    K,
    n_cols,
    depth,
    half,
    s_x,
    s_w_e,
    s_w_n,
    s_w_k,
    s_b_l,
    s_b_e,
    s_out,
    limit,
    alpha,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    HALVES: tl.constexpr,
    COLUMN_RUNS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    Y_BY_TOKEN: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    SLOT_CAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    HALVE: tl.constexpr,
):
    """out = act(x·Wᵀ + bias + y·Bᵀ) for one tile and BN columns of W.

    GATHER: x is by token, else by row. SCATTER: out is by pair, else by row. HALVES: 0 the columns are W's; 1 column c
    is row c//2 of half c%2 (gate, up), the halves lying `half` rows apart; 2 the same, W being stored that way. With
    halves, the activation leaves BN/2 columns. y `[P or T, RP]` holds A x; b is `[L, E or 1, out, R]`. The
    first WIDE·BK LoRA columns of a tile stand in wide `[P, WIDE·BK]`, each row's own at their place; y has the rest.
    OFFSET: the integer type that reaches every element of x, wide and b. COLUMN_RUNS: W's columns lie side by side, and
    their number is a multiple of 16.
    """
    # GROUP tiles walk through the columns together, so that they share the weights of their expert in L2.
    i_tile, i_n = place(tl.program_id(0), tiles, tl.cdiv(n_cols, BN), GROUP)
    # All loaded before the first of them is looked at: one latency instead of three.
    expert = tl.load(p_tile_expert + i_tile)
    first = tl.load(p_tile_first + i_tile)
    rows = tl.load(p_tile_rows + i_tile)
    b_pair = tl.load(p_tile_pairs + i_tile * BM + tl.arange(0, BM))  # [BM]
    b_pair_half = tl.load(p_tile_pairs + i_tile * BM + tl.arange(0, BM // 2))  # [BM/2]
    num_slots = 0
    b_kb = tl.arange(0, BK)
    b_kb1 = b_kb
    if HAS_LORA:
        num_slots = tl.load(p_tile_num_slots + i_tile)
        p_slots = p_tile_slots + i_tile * SLOT_CAP
        if WIDE > 0:
            b_kb = factor_offsets(p_slots, tl.arange(0, BK), s_b_l, OFFSET, RP, SLOT_CAP)
        if WIDE > 1:
            b_kb1 = factor_offsets(p_slots, BK + tl.arange(0, BK), s_b_l, OFFSET, RP, SLOT_CAP)
    if expert < 0:
        return
    # The last tile of an expert is often small: half the rows cost half the products.
    if HALVE and rows <= BM // 2:
        product_tile(
            expert,
            i_tile,
            i_n,
            first,
            rows,
            b_pair_half,
            num_slots,
            b_kb,
            b_kb1,
            p_x,
            p_w,
            p_bias,
            p_y,
            p_wide,
            p_b,
            p_rank,
            p_out,
            p_row_slot,
            p_tile_slots,
            K,
            n_cols,
            depth,
            half,
            s_x,
            s_w_e,
            s_w_n,
            s_w_k,
            s_b_l,
            s_b_e,
            s_out,
            limit,
            alpha,
            GATHER,
            SCATTER,
            HALVES,
            COLUMN_RUNS,
            ACT,
            HAS_BIAS,
            HAS_LORA,
            WIDE,
            OFFSET,
            Y_BY_TOKEN,
            R,
            RP,
            SLOT_CAP,
            EVEN_K,
            PRECISION,
            BM // 2,
            BN,
            BK,
            BR,
        )
    else:
        product_tile(
            expert,
            i_tile,
            i_n,
            first,
            rows,
            b_pair,
            num_slots,
            b_kb,
            b_kb1,
            p_x,
            p_w,
            p_bias,
            p_y,
            p_wide,
            p_b,
            p_rank,
            p_out,
            p_row_slot,
            p_tile_slots,
            K,
            n_cols,
            depth,
            half,
            s_x,
            s_w_e,
            s_w_n,
            s_w_k,
            s_b_l,
            s_b_e,
            s_out,
            limit,
            alpha,
            GATHER,
            SCATTER,
            HALVES,
            COLUMN_RUNS,
            ACT,
            HAS_BIAS,
            HAS_LORA,
            WIDE,
            OFFSET,
            Y_BY_TOKEN,
            R,
            RP,
            SLOT_CAP,
            EVEN_K,
            PRECISION,
            BM,
            BN,
            BK,
            BR,
        )
