"""Triton kernels of the routed experts: the grouped product with LoRA inside, the shrink of A, the sum over K.

Legend: T tokens, K experts per token, E experts, L adapter slots, R rank, H hidden, I expert width, P pairs (= T·K).
Rows are pairs ordered by (expert, slot); a tile holds rows of one expert and lists the slots it meets (ops/routes).

LoRA's columns. For a tile that meets n slots, the factors of these slots stand side by side: column c belongs to slot
number c // RP of the tile and to its rank index c % RP, RP being the rank rounded up to 16. A row keeps its own slot's
columns and sees zeros in all others, so several slots share one matrix instruction. A slot always starts at a multiple
of 16 columns, one instruction's depth, so a row's sum has the same terms in the same instruction whoever shares its
tile. The factors must be finite: zero times an infinity of another slot would reach this row.
"""

import triton
import triton.language as tl


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
def lora_columns(p_tile_slots, p_rank, o_c, num_slots, RP: tl.constexpr):
    """For LoRA columns: their slot (a valid one everywhere), rank index, and whether their 16 are in use."""
    b_j = o_c // RP
    b_r = o_c % RP
    b_slot = tl.load(p_tile_slots + tl.minimum(b_j, num_slots - 1))
    # A slot of rank 16 or less is computed whole: its zeros cost less than waiting for its rank.
    b_rank = tl.load(p_rank + b_slot) if RP > 16 else tl.full(o_c.shape, 16, tl.int32)
    # Sixteen columns that start at a multiple of 16 are one slot's: said so (on arithmetic, for the compiler overlooks
    # hints on loads), loads of factors become 16 bytes wide.
    m_c = tl.max_constancy((b_j < num_slots) & (b_r // 16 * 16 < b_rank), 16)
    return b_slot, b_r, m_c


@triton.jit
def tile_rows(p_sorted, first, rows, K, BM: tl.constexpr):
    """A tile's row numbers, their mask, and each row's pair; rows beyond the tile repeat its first row."""
    o_m = tl.arange(0, BM)
    m_m = o_m < rows
    b_row = first + tl.where(m_m, o_m, 0)
    return b_row, m_m, tl.load(p_sorted + b_row)


@triton.jit
def product_tile(
    expert,
    i_tile,
    i_n,
    rows,
    p_x,
    p_w,
    p_bias,
    p_y,
    p_b,
    p_rank,
    p_out,
    p_sorted,
    p_row_slot,
    p_tile_first,
    p_tile_slots,
    p_tile_num_slots,
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
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
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
    """One tile of `grouped_product`, of BM rows."""
    b_row, m_m, b_pair = tile_rows(p_sorted, tl.load(p_tile_first + i_tile), rows, K, BM)  # [BM]
    b_token = b_pair // K

    o_n = i_n * BN + tl.arange(0, BN)  # [BN]
    b_n = tl.minimum(o_n, n_cols - 1)
    if HALVES == 1:
        b_n = (b_n % 2) * half + b_n // 2
    o_k = tl.arange(0, BK)
    b_x = b_token if GATHER else b_row
    p_a = p_x + b_x.to(tl.int64)[:, None] * s_x + o_k[None, :]  # [BM, BK]
    p_wt = p_w + expert.to(tl.int64) * s_w_e + b_n[None, :] * s_w_n + o_k[:, None] * s_w_k  # [BK, BN]
    b_acc = tl.zeros([BM, BN], tl.float32)
    for o_depth in range(0, depth, BK):
        if EVEN_K:
            b_a = tl.load(p_a)
            b_w = tl.load(p_wt)
        else:
            b_a = tl.load(p_a, mask=o_k[None, :] < depth - o_depth, other=0.0)
            b_w = tl.load(p_wt, mask=o_k[:, None] < depth - o_depth, other=0.0)
        b_acc = tl.dot(b_a, b_w, b_acc, input_precision=PRECISION)
        p_a += BK
        p_wt += BK * s_w_k

    if HAS_LORA:
        # Beyond a slot's rank, to the end of its 16 columns, y holds zeros; so does B, up to its width R.
        num_slots = tl.load(p_tile_num_slots + i_tile)
        p_slots = p_tile_slots + i_tile * SLOT_CAP
        b_row_slot = tl.load(p_row_slot + b_row)  # [BM]
        b_y_row = b_token if Y_BY_TOKEN else b_row
        p_yt = p_y + b_y_row.to(tl.int64)[:, None] * RP
        p_bt = p_b + expert.to(tl.int64) * s_b_e + b_n[None, :] * R
        if RP <= BR:
            for o_c in range(0, num_slots * RP, BR):
                b_slot, b_r, m_c = lora_columns(p_slots, p_rank, o_c + tl.arange(0, BR), num_slots, RP)  # [BR]
                m_y = m_c[None, :] & tl.max_constancy(b_row_slot[:, None] == b_slot[None, :], [1, 16])
                b_y = tl.load(p_yt + b_r[None, :], mask=m_y, other=0.0)  # [BM, BR]
                m_b = m_c if R % 16 == 0 else m_c & (b_r < R)
                b_b = tl.max_constancy(b_slot.to(tl.int64) * s_b_l, 16) + b_r
                b_f = tl.load(p_bt + b_b[:, None], mask=m_b[:, None], other=0.0)  # [BR, BN]
                b_acc = tl.dot(b_y, b_f, b_acc, input_precision=PRECISION)
        else:
            for i_slot in range(num_slots):
                slot = tl.load(p_slots + i_slot)
                rank = tl.load(p_rank + slot)
                m_slot = b_row_slot == slot
                for o_r in range(0, rank, BR):
                    b_r = o_r + tl.arange(0, BR)  # [BR]
                    m_c = b_r // 16 * 16 < rank
                    b_y = tl.load(p_yt + b_r[None, :], mask=m_slot[:, None] & m_c[None, :], other=0.0)
                    m_b = m_c if R % 16 == 0 else m_c & (b_r < R)
                    p_bs = p_bt + slot.to(tl.int64) * s_b_l
                    b_f = tl.load(p_bs + b_r[:, None], mask=m_b[:, None], other=0.0)
                    b_acc = tl.dot(b_y, b_f, b_acc, input_precision=PRECISION)

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
    p_b,
    p_rank,
    p_out,
    p_sorted,
    p_row_slot,
    p_tile_expert,
    p_tile_first,
    p_tile_rows,
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
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
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
):
    """out = act(x·Wᵀ + bias + y·Bᵀ) for one tile and BN columns of W.

    GATHER: x is by token, else by row. SCATTER: out is by pair, else by row. HALVES: 0 the columns are W's; 1 column c
    is row c//2 of half c%2 (gate, up), the halves lying `half` rows apart; 2 the same, W being stored that way. With
    halves, the activation leaves BN/2 columns. y `[P or T, RP]` holds A x; b is `[L, E or 1, out, R]`.
    """
    # GROUP tiles walk through the columns together, so that they share the weights of their expert in L2.
    i_pid = tl.program_id(0)
    blocks_n = tl.cdiv(n_cols, BN)
    i_group = i_pid // (GROUP * blocks_n)
    group = tl.minimum(tiles - i_group * GROUP, GROUP)
    i_in = i_pid % (GROUP * blocks_n)
    i_tile = i_group * GROUP + i_in % group
    i_n = i_in // group
    expert = tl.load(p_tile_expert + i_tile)
    if expert < 0:
        return
    rows = tl.load(p_tile_rows + i_tile)
    # The last tile of an expert is often small: half the rows cost half the products.
    if BM >= 128 and rows <= BM // 2:
        product_tile(
            expert,
            i_tile,
            i_n,
            rows,
            p_x,
            p_w,
            p_bias,
            p_y,
            p_b,
            p_rank,
            p_out,
            p_sorted,
            p_row_slot,
            p_tile_first,
            p_tile_slots,
            p_tile_num_slots,
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
            ACT,
            HAS_BIAS,
            HAS_LORA,
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
            rows,
            p_x,
            p_w,
            p_bias,
            p_y,
            p_b,
            p_rank,
            p_out,
            p_sorted,
            p_row_slot,
            p_tile_first,
            p_tile_slots,
            p_tile_num_slots,
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
            ACT,
            HAS_BIAS,
            HAS_LORA,
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


@triton.jit
def shrink(
    p_x,
    p_a,
    p_rank,
    p_y,
    p_sorted,
    p_row_slot,
    p_tile_expert,
    p_tile_first,
    p_tile_rows,
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
    RP: tl.constexpr,
    SLOT_CAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """y = A x for one tile, each row with its own slot's A, in passes of BC of the tile's LoRA columns."""
    i_tile = tl.program_id(0) // col_blocks
    i_c = tl.program_id(0) % col_blocks
    expert = tl.load(p_tile_expert + i_tile)
    if expert < 0:
        return
    num_slots = tl.load(p_tile_num_slots + i_tile)
    if i_c * BC >= num_slots * RP:
        return
    rows = tl.load(p_tile_rows + i_tile)
    b_row, m_m, b_pair = tile_rows(p_sorted, tl.load(p_tile_first + i_tile), rows, K, BM)  # [BM]
    b_token = b_pair // K
    b_row_slot = tl.load(p_row_slot + b_row)  # [BM]
    o_k = tl.arange(0, BK)
    b_x = b_token if GATHER else b_row
    p_xt = p_x + b_x.to(tl.int64)[:, None] * s_x + o_k[None, :]  # [BM, BK]
    b_y_to = (b_token if Y_BY_TOKEN else b_row).to(tl.int64)[:, None] * RP
    for o_c in range(i_c * BC, num_slots * RP, col_blocks * BC):
        o_cc = o_c + tl.arange(0, BC)  # [BC]
        b_slot, b_r, m_c = lora_columns(p_tile_slots + i_tile * SLOT_CAP, p_rank, o_cc, num_slots, RP)
        m_c = m_c & (o_cc < num_slots * RP)
        if tl.sum(m_c.to(tl.int32), 0) > 0:
            # Columns beyond the rank read rank index 0, a valid address, and become zeros.
            m_r = m_c & (b_r < tl.load(p_rank + b_slot))
            b_at = b_slot.to(tl.int64) * s_a_l + tl.where(m_r, b_r, 0) * s_a_r + expert.to(tl.int64) * s_a_e
            p_at = p_a + b_at[None, :] + o_k[:, None]  # [BK, BC]
            p_xk = p_xt
            b_acc = tl.zeros([BM, BC], tl.float32)
            for o_depth in range(0, depth, BK):
                if EVEN_K:
                    b_xk = tl.load(p_xk)
                    b_ak = tl.load(p_at)
                else:
                    b_xk = tl.load(p_xk, mask=o_k[None, :] < depth - o_depth, other=0.0)
                    b_ak = tl.load(p_at, mask=o_k[:, None] < depth - o_depth, other=0.0)
                b_acc = tl.dot(b_xk, b_ak, b_acc, input_precision=PRECISION)
                p_xk += BK
                p_at += BK
            m_y = m_m[:, None] & m_c[None, :] & (b_row_slot[:, None] == b_slot[None, :])
            b_acc = tl.where(m_r[None, :], b_acc, 0.0)
            tl.store(p_y + b_y_to + b_r[None, :], b_acc.to(p_y.dtype.element_ty), mask=m_y)


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
