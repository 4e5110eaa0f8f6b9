"""The plan of a packed batch on the host equals what the device cuts from its token→slot map."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, run_tiles, sorted_tiles
from moelora.batching.packing import pack_ids
from moelora_kernels.metadata import RowBuffers, RowSizes, plan_runs, plan_sorted
from moelora_kernels.ops.routes import RouteBuffers, order_tokens

DEVICE = torch.device(DEVICES[0])
REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 2)), min_size=1, max_size=8)


def packed(requests):
    """The batch of some requests, each a length and a slot; and the slots of its rows."""
    lengths, slots = [n for n, _ in requests], [s for _, s in requests]
    batch = pack_ids([[0] * length for length in lengths], slots, DEVICE)
    return batch, [slot for length, slot in requests for _ in range(length)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(requests=REQUESTS, tile_rows=st.sampled_from([16, 32]))
def test_plans_equal_what_the_device_cuts(requests, tile_rows):
    batch, flat = packed(requests)
    for plan, rows in (
        (plan_runs(batch, tile_rows), run_tiles(flat, tile_rows, str(DEVICE))),
        (plan_sorted(batch, tile_rows), sorted_tiles(flat, str(DEVICE), tile_rows)),
    ):
        count = int(rows.tiles.count_1)
        assert list(plan.start_C) == rows.tiles.start_C[:count].tolist()
        assert list(plan.rows_C) == rows.tiles.rows_C[:count].tolist()
        assert list(plan.slot_C) == rows.tiles.slot_C[:count].tolist()
        if plan.perm_T is not None:
            assert plan.perm_T.tolist() == rows.perm_T.tolist()


def sizes_of(tokens=400, entries=30, permuted=False):
    return RowSizes(tokens=tokens, tiles=50, tile_rows=16, permuted=permuted, entries=entries)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(requests=REQUESTS, padding=st.integers(0, 40))
def test_the_order_by_slot_equals_what_the_device_makes(requests, padding):
    batch, flat = packed(requests)
    sizes = sizes_of(tokens=len(flat) + padding)
    buffers = RowBuffers(sizes, sizes.allocate(DEVICE))
    buffers.refresh(plan_runs(batch, 16), batch)
    routes = RouteBuffers(max_tokens=400, top_k=2, num_experts=4, num_slots=3, block_m=16, device=DEVICE)
    made = order_tokens(buffers.token_slot_T, buffers=routes, num_live=buffers.num_live_1)
    assert buffers.order_T.tolist() == made.tolist()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    batches=st.lists(st.tuples(REQUESTS, st.integers(0, 80)), min_size=2, max_size=4),
    permuted=st.booleans(),
    entries=st.sampled_from([None, 30]),
)
def test_a_refresh_leaves_nothing_of_the_batch_before(batches, permuted, entries):
    """Batches of several buckets, one after the other in the same memory."""
    memory = sizes_of(permuted=True).allocate(DEVICE).fill_(12345)
    plan = plan_sorted if permuted else plan_runs
    for requests, padding in batches:
        batch, flat = packed(requests)
        live, tail = len(flat), list(range(len(flat), len(flat) + padding))
        sizes = sizes_of(tokens=live + padding, entries=entries, permuted=permuted)
        for buffers in (shared := RowBuffers(sizes, memory), fresh := RowBuffers(sizes, sizes.allocate(DEVICE))):
            buffers.refresh(plan(batch, 16), batch)
        assert torch.equal(shared._flat, fresh._flat)
        assert int(shared.num_live_1) == live
        assert shared.token_slot_T.tolist() == flat + [-1] * padding
        assert shared.order_T.tolist() == sorted(range(live), key=lambda row: flat[row]) + tail
        if permuted:
            assert (
                shared.tiles.perm_T.tolist() == sorted(range(live), key=lambda row: (flat[row] < 0, flat[row])) + tail
            )
        assert (shared.blocks is None) == (entries is None)


def test_sizes_beyond_the_memory_are_refused():
    memory = sizes_of(tokens=16).allocate(DEVICE)
    with pytest.raises(AssertionError, match="do not fit"):
        RowBuffers(sizes_of(tokens=17), memory[:-1])
