"""Dense LoRA over runs of rows: every shape equals the naive truth, and a row's bits are the row's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import (
    DEVICES,
    TOLERANCE,
    Guarded,
    make_bank,
    randn,
    relative_error,
    run_tiles,
    slot_tensor,
    sorted_tiles,
)
from moelora.backends.base import DenseSlots
from moelora.errors import ConfigError
from moelora_kernels.ops.dense_lora import (
    cut_tiles,
    dense_lora,
    embedding_lora,
    make_tile_list,
    naive_dense_lora,
    naive_embedding_lora,
    padded_rank,
    scratch_numel,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = {"runs": run_tiles, "sorted": lambda slots, rows, device: sorted_tiles(slots, device, rows)}


def check_linear(slots, ranks, width_in, widths, dtype, device, *, order="runs", tile_rows=16, bank_rank=0):
    """Runs the kernels into poisoned, guarded buffers and compares with the naive truth."""
    rows = ROWS[order](slots, tile_rows, device)
    banks = [
        make_bank(ranks, width_in, width, seed=7 * i, dtype=dtype, device=device, bank_rank=bank_rank)
        for i, width in enumerate(widths)
    ]
    tokens = len(slots)
    x_TK = randn(tokens, width_in, seed=1, dtype=dtype, device=device)
    outs = [Guarded((tokens, width), dtype, device) for width in widths]
    wants = []
    for i, out in enumerate(outs):
        out.tensor.copy_(randn(*out.tensor.shape, seed=50 + i))
        wants.append(out.tensor.clone())
        naive_dense_lora(x_TK, wants[i], banks[i], slot_tensor(slots, device))
    scratch = Guarded((scratch_numel(tokens, max([bank_rank, *ranks, 1])),), dtype, device)
    dense_lora(x_TK, [out.tensor for out in outs], banks, rows, scratch=scratch.tensor)
    scratch.check()
    for out, want in zip(outs, wants, strict=True):
        out.check()
        if want.numel():
            assert relative_error(out.tensor, want) < TOLERANCE[dtype]
            base = [row for row, slot in enumerate(slots) if slot < 0 or ranks[slot] == 0]
            assert torch.equal(out.tensor[base], want[base]), "a base row was touched"
    return [out.tensor for out in outs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["runs", "sorted"])
def test_ragged_rows_of_mixed_ranks_equal_naive(device, dtype, order):
    slots = [0] + [1] * 7 + [0] * 2 + [2] * 19 + [-1] * 5 + [0] * 3
    check_linear(slots, [8, 33, 3], 37, [70, 5, 24], dtype, device, order=order)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "slots",
    [[], [-1], [0], [-1] * 20, [0] * 33, [-1, 0, 1, 0, -1], [1, -1, -1], [0, 1] * 9, [-1] * 3 + [1] * 16 + [0]],
    ids=["empty", "one_base", "one", "all_base", "one_slot", "base_ends", "base_last", "alternating", "full_tile"],
)
@pytest.mark.parametrize("order", ["runs", "sorted"])
def test_edges_of_the_batch(device, slots, order):
    check_linear(slots, [4, 16], 20, [18], torch.float32, device, order=order)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [[1, 0], [0, 0], [256, 1], [64, 17]])
def test_ranks_from_0_to_256(device, ranks):
    check_linear([0, 0, 1, -1, 1], ranks, 24, [20], torch.float32, device, bank_rank=max([1, *ranks]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_number_of_fused_projections(device, count):
    check_linear([0] * 3 + [1], [3, 20], 16, [8 + i for i in range(count)], torch.float32, device)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    slots=st.lists(st.integers(-1, 2), max_size=24),
    ranks=st.lists(st.sampled_from([0, 1, 5, 16, 19]), min_size=3, max_size=3),
    width_in=st.integers(1, 40),
    widths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    tile_rows=st.sampled_from([16, 32]),
    order=st.sampled_from(["runs", "sorted"]),
)
def test_any_shape_equals_naive(slots, ranks, width_in, widths, tile_rows, order):
    check_linear(slots, ranks, width_in, widths, torch.float32, DEVICES[0], order=order, tile_rows=tile_rows)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    slots=st.lists(st.integers(-1, 1), max_size=20),
    ranks=st.lists(st.sampled_from([0, 1, 17, 33]), min_size=2, max_size=2),
    vocabulary=st.integers(1, 30),
    order=st.sampled_from(["runs", "sorted"]),
)
def test_embedding_equals_naive(slots, ranks, vocabulary, order):
    device = DEVICES[0]
    bank = make_bank(ranks, vocabulary, 21, seed=3, dtype=torch.float32, device=device, bank_rank=34)
    ids_T = (torch.arange(len(slots), device=device) * 7) % vocabulary
    out = Guarded((len(slots), 21), torch.float32, device)
    out.tensor.copy_(randn(len(slots), 21, seed=4))
    want = out.tensor.clone()
    naive_embedding_lora(ids_T, want, bank, slot_tensor(slots, device))
    scratch = Guarded((scratch_numel(len(slots), 34),), torch.float32, device)
    embedding_lora(ids_T, out.tensor, bank, ROWS[order](slots, 16, device), scratch=scratch.tensor)
    out.check()
    scratch.check()
    if slots:
        assert relative_error(out.tensor, want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_embedding_in_bfloat16_equals_naive(device):
    bank = make_bank([5, 18], 30, 24, seed=3, dtype=torch.bfloat16, device=device)
    slots, ids_T = [0, 1, -1, 1, 1, 0], torch.tensor([29, 0, 3, 3, 7, 1], device=device)
    out_TN = randn(6, 24, seed=4, dtype=torch.bfloat16, device=device)
    want = out_TN.clone()
    naive_embedding_lora(ids_T, want, bank, slot_tensor(slots, device))
    embedding_lora(ids_T, out_TN, bank, run_tiles(slots, 16, device))
    assert relative_error(out_TN, want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(device, dtype):
    slots = [1] * 9 + [-1] * 2 + [0] * 21
    bank = make_bank([6, 18], 40, 30, seed=2, dtype=dtype, device=device)
    x_TK = randn(len(slots), 40, seed=1, dtype=dtype, device=device)
    base = randn(len(slots), 30, seed=5, dtype=dtype, device=device)

    def run(rows: list[int], order: str, tile_rows: int) -> torch.Tensor:
        out = base[rows].clone()
        dense_lora(x_TK[rows], [out], [bank], ROWS[order]([slots[r] for r in rows], tile_rows, device))
        return out

    everything = list(range(len(slots)))
    whole = run(everything, "runs", 16)
    assert torch.equal(whole, run(everything, "sorted", 16))
    assert torch.equal(whole, run(everything, "runs", 64))
    assert torch.equal(whole.flip(0), run(everything[::-1], "runs", 32))
    for row in (0, 8, 9, 31):
        assert torch.equal(whole[row : row + 1], run([row], "runs", 16))


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_activations_take_a_bfloat16_bank(device):
    slots = [0, 0, -1, 1]
    bank = make_bank([4, 2], 18, 12, seed=2, dtype=torch.bfloat16, device=device)
    x_TK, out_TN = randn(4, 18, seed=1, device=device), randn(4, 12, seed=3, device=device)
    want = out_TN.clone()
    naive_dense_lora(x_TK, want, bank, slot_tensor(slots, device))
    dense_lora(x_TK, [out_TN], [bank], run_tiles(slots, 16, device))
    assert relative_error(out_TN, want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_lie_apart(device):
    slots = [0] * 3 + [1] * 2
    bank = make_bank([4, 2], 16, 12, seed=2, dtype=torch.float32, device=device)
    x_TK = randn(5, 48, seed=1, device=device)[:, 16:32]
    wide = randn(5, 40, seed=3, device=device)
    before = wide.clone()
    want = wide[:, 8:20].clone()
    naive_dense_lora(x_TK, want, bank, slot_tensor(slots, device))
    dense_lora(x_TK, [wide[:, 8:20]], [bank], run_tiles(slots, 16, device))
    assert relative_error(wide[:, 8:20], want) < TOLERANCE[torch.float32]
    assert torch.equal(wide[:, :8], before[:, :8])
    assert torch.equal(wide[:, 20:], before[:, 20:])


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_batch_after_a_large_one_sees_nothing_of_it(device):
    tiles = make_tile_list(8, torch.device(device))
    cut_tiles(slot_tensor([0] * 40 + [1] * 20, device), 16, tiles)
    assert int(tiles.count_1) == 5
    cut_tiles(slot_tensor([1, 1] + [-1] * 58, device), 16, tiles)
    assert int(tiles.count_1) == 1
    assert tiles.rows_C[:8].tolist() == [2] + [0] * 7
    assert tiles.slot_C[:8].tolist() == [1] + [-1] * 7
    cut_tiles(slot_tensor([], device), 16, tiles)
    assert int(tiles.count_1) == 0
    assert set(tiles.slot_C[:8].tolist()) == {-1}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(slots=st.lists(st.integers(-1, 2), max_size=50), tile_rows=st.sampled_from([16, 32]))
def test_tiles_cover_each_adapter_row_once(slots, tile_rows):
    tiles = make_tile_list(len(slots), torch.device(DEVICES[0]))
    cut_tiles(slot_tensor(slots, DEVICES[0]), tile_rows, tiles)
    covered = {}
    for i in range(int(tiles.count_1)):
        start, rows, slot = int(tiles.start_C[i]), int(tiles.rows_C[i]), int(tiles.slot_C[i])
        assert 0 < rows <= tile_rows
        assert not covered.keys() & set(range(start, start + rows))
        covered |= dict.fromkeys(range(start, start + rows), slot)
    assert covered == {row: slot for row, slot in enumerate(slots) if slot >= 0}


def _refuse(message: str, **change):
    device = DEVICES[0]
    bank = make_bank([4], 16, 12, seed=2, dtype=change.get("factor", torch.float32), device=device)
    bank = change.get("bank", bank)
    x_TK = change.get("x", randn(3, 16, seed=1, device=device))
    out_TN = change.get("out", randn(3, 12, seed=1, device=device))
    with pytest.raises(ConfigError, match=message):
        dense_lora(x_TK, [out_TN], [bank], run_tiles([0] * 3, 16, device))


def test_refusals_say_why_and_what_instead():
    device = DEVICES[0]
    _refuse("dtype torch.float64 has no kernel; use bfloat16", x=randn(3, 16, seed=1, device=device).double())
    _refuse("x is torch.bfloat16, out torch.float32", x=randn(3, 16, seed=1, dtype=torch.bfloat16, device=device))
    half = torch.float16
    _refuse("a bank in the dtype", x=randn(3, 16, seed=1, dtype=half, device=device),
            out=randn(3, 12, seed=1, dtype=half, device=device))  # fmt: skip
    _refuse("not contiguous", out=randn(12, 3, seed=1, device=device).T)
    wide = make_bank([300], 16, 12, seed=1, dtype=torch.float32, device=device)
    _refuse("rank 300 is over 256; use the 'torch' backend", bank=wide)
    loose = DenseSlots(a_LRI=randn(1, 16, 4, seed=1, device=device).mT, b_LOR=randn(1, 12, 4, seed=1, device=device),
                       ranks_L=torch.tensor([4], dtype=torch.int32, device=device))  # fmt: skip
    _refuse("A is not contiguous", bank=loose)


def test_padded_rank():
    assert [padded_rank(rank) for rank in (0, 1, 16, 17, 256)] == [0, 16, 16, 32, 256]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["runs", "sorted"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_projections_of_low_rank_share_one_product(device, order, count):
    """Mixed ranks up to 16, slots that leave a projection alone; the bits of each projection by itself."""
    slots = [0] * 20 + [-1] * 3 + [2] * 9 + [1] * 30
    rows = run_tiles(slots, 16, device) if order == "runs" else sorted_tiles(slots, device, 16)
    x_TK = randn(len(slots), 70, seed=1, dtype=torch.bfloat16, device=device)
    banks = [
        make_bank(ranks, 70, 24, seed=i, dtype=torch.bfloat16, device=device)
        for i, ranks in enumerate([[16, 3, 0], [5, 0, 5], [1, 16, 16], [7, 7, 7]][:count])
    ]
    together = [randn(len(slots), 24, seed=9, dtype=torch.bfloat16, device=device) for _ in banks]
    alone = [out.clone() for out in together]
    scratch = torch.full((scratch_numel(len(slots), 16),), float("nan"), dtype=torch.bfloat16, device=device)
    dense_lora(x_TK, together, banks, rows, scratch=scratch)
    for out, one in zip(alone, banks, strict=True):
        dense_lora(x_TK, [out], [one], rows)
    for got, want in zip(together, alone, strict=True):
        assert torch.equal(got, want)
        assert not got.isnan().any()
