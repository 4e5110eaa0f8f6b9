"""LoRA inside a product: several slots' factors side by side as further columns of its depth. Device functions only.

LoRA's columns. For a tile that meets n slots, the factors of these slots stand side by side: column c belongs to slot
number c // RP of the tile and to its rank index c % RP, RP being the rank rounded up to 16. A row keeps its own slot's
columns and sees zeros in all others, so several slots share one matrix instruction. A slot always starts at a multiple
of 16 columns, one instruction's depth, so a row's sum has the same terms in the same instruction whoever shares its
tile. The factors must be finite: zero times an infinity of another slot would reach this row.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit
def tile_rows(first, rows, BM: tl.constexpr):
    """A tile's row numbers and their mask; rows beyond the tile repeat its first row."""
    o_m = tl.arange(0, BM)
    m_m = o_m < rows
    return first + tl.where(m_m, o_m, 0), m_m


@triton.jit
def column_slots(p_slots, o_c, RP: tl.constexpr, SLOT_CAP: tl.constexpr):
    """The slots of LoRA columns; a valid one everywhere, as the list is to its end: nobody waits for its length."""
    return tl.load(p_slots + tl.minimum(o_c // RP, SLOT_CAP - 1))


@triton.jit
def lora_columns(b_slot, p_rank, o_c, num_slots, RP: tl.constexpr):
    """For LoRA columns of these slots: their rank index, and whether their 16 are in use."""
    b_r = o_c % RP
    # A slot of rank 16 or less is computed whole: its zeros cost less than waiting for its rank.
    b_rank = tl.load(p_rank + b_slot) if RP > 16 else tl.full(o_c.shape, 16, tl.int32)
    # Sixteen columns that start at a multiple of 16 are one slot's: said so (on arithmetic, for the compiler overlooks
    # hints on loads), loads of factors become 16 bytes wide.
    m_c = tl.max_constancy((o_c // RP < num_slots) & (b_r // 16 * 16 < b_rank), 16)
    return b_r, m_c


@triton.jit
def factor_offsets(p_slots, o_c, s_b_l, OFFSET: tl.constexpr, RP: tl.constexpr, SLOT_CAP: tl.constexpr):
    """Where LoRA columns of a tile stand in a row of B's bank."""
    return tl.max_constancy(column_slots(p_slots, o_c, RP, SLOT_CAP).to(OFFSET) * s_b_l, 16) + o_c % RP


@triton.jit
def add_lora_columns(
    b_acc,
    p_slots,
    num_slots,
    p_rank,
    b_row_slot,
    p_yt,
    p_bt,
    s_b_l,
    START: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    SLOT_CAP: tl.constexpr,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + y·Bᵀ from column START on, each row with its own slot.

    p_yt `[BM, 1]` and p_bt `[1, BN]` point at rank index 0 of each row. Beyond a slot's rank, to the end of its 16
    columns, y must hold zeros, or B must, up to its width R.
    """
    if RP <= BR:
        for o_c in range(START, num_slots * RP, BR):
            o_cc = o_c + tl.arange(0, BR)  # [BR]
            b_slot = column_slots(p_slots, o_cc, RP, SLOT_CAP)
            b_r, m_c = lora_columns(b_slot, p_rank, o_cc, num_slots, RP)
            m_y = m_c[None, :] & tl.max_constancy(b_row_slot[:, None] == b_slot[None, :], [1, 16])
            b_y = tl.load(p_yt + b_r[None, :], mask=m_y, other=0.0)  # [BM, BR]
            m_b = m_c if R % 16 == 0 else m_c & (b_r < R)
            b_b = tl.max_constancy(b_slot.to(tl.int64) * s_b_l, 16) + b_r
            b_f = tl.load(p_bt + b_b[:, None], mask=m_b[:, None], other=0.0)  # [BR, BN]
            b_acc = tl.dot(b_y, b_f.to(b_y.dtype), b_acc, input_precision=PRECISION)
    else:
        for i_slot in range(START // RP, num_slots):
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
                b_acc = tl.dot(b_y, b_f.to(b_y.dtype), b_acc, input_precision=PRECISION)
    return b_acc
