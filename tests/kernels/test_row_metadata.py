"""The plan of a packed batch on the host equals what the device cuts from its token→slot map."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, run_tiles, sorted_tiles
from moelora_kernels.metadata import RowBuffers, order_by_slot, plan_runs, plan_sorted
from moelora_kernels.ops.routes import RouteBuffers, order_tokens

DEVICE = torch.device(DEVICES[0])
REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 2)), max_size=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(requests=REQUESTS, tile_rows=st.sampled_from([16, 32]))
def test_plans_equal_what_the_device_cuts(requests, tile_rows):
    lengths, slots = [n for n, _ in requests], [s for _, s in requests]
    flat = [slot for length, slot in requests for _ in range(length)]
    for plan, rows in (
        (plan_runs(lengths, slots, tile_rows), run_tiles(flat, tile_rows, str(DEVICE))),
        (plan_sorted(lengths, slots, tile_rows), sorted_tiles(flat, str(DEVICE), tile_rows)),
    ):
        count = int(rows.tiles.count_1)
        assert plan.start_C.tolist() == rows.tiles.start_C[:count].tolist()
        assert plan.rows_C.tolist() == rows.tiles.rows_C[:count].tolist()
        assert plan.slot_C.tolist() == rows.tiles.slot_C[:count].tolist()
        if plan.perm_T is not None:
            assert plan.perm_T.tolist() == rows.perm_T.tolist()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(requests=REQUESTS, padding=st.integers(0, 40))
def test_the_order_by_slot_equals_what_the_device_makes(requests, padding):
    lengths, slots = [n for n, _ in requests], [s for _, s in requests]
    live = sum(lengths)
    bucket = live + padding
    buffers = RowBuffers(tiles=50, tokens=400, entries=30, permuted=False, device=DEVICE)
    buffers.refresh(plan_runs(lengths, slots, 16), lengths, slots)
    assert order_by_slot(lengths, slots).tolist() == buffers.order_T[:live].tolist()
    if bucket:
        routes = RouteBuffers(max_tokens=400, top_k=2, num_experts=4, num_slots=3, block_m=16, device=DEVICE)
        made = order_tokens(buffers.token_slot_T[:bucket], buffers=routes, num_live=buffers.num_live_1)
        assert buffers.order_T[:bucket].tolist() == made.tolist()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(batches=st.lists(REQUESTS, min_size=2, max_size=4), permuted=st.booleans())
def test_a_refresh_leaves_nothing_of_the_batch_before(batches, permuted):
    buffers = RowBuffers(tiles=50, tokens=400, entries=30, permuted=permuted, device=DEVICE)
    plan = plan_sorted if permuted else plan_runs
    for requests in batches:
        lengths, slots = [n for n, _ in requests], [s for _, s in requests]
        buffers.refresh(plan(lengths, slots, 16), lengths, slots)
    fresh = RowBuffers(tiles=50, tokens=400, entries=30, permuted=permuted, device=DEVICE)
    fresh.refresh(plan(lengths, slots, 16), lengths, slots)
    assert torch.equal(buffers._flat, fresh._flat)
    live = sum(lengths)
    assert int(buffers.num_live_1) == live
    assert set(buffers.token_slot_T[live:].tolist()) <= {-1}
    if permuted:
        assert sorted(buffers.perm_T.tolist()) == list(range(400))
