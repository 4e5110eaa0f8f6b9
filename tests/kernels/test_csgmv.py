"""Rows ordered by slot: permutation and chunks equal the plain-Python truth. Products are in test_dense_lora."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, slot_tensor
from moelora.capacity import PrefillCapacity, csgmv_chunk_rows
from moelora_kernels.ops.csgmv import chunk_capacity, naive_chunks, order_rows
from moelora_kernels.ops.dense_lora import make_tile_list


@settings(max_examples=40, deadline=None, derandomize=True)
@given(slots=st.lists(st.integers(-1, 3), max_size=70), chunk_rows=st.sampled_from([16, 32]))
def test_order_and_chunks_equal_naive(slots, chunk_rows):
    device = DEVICES[0]
    chunks = make_tile_list(len(slots), torch.device(device))
    perm_N = torch.full((len(slots),), -7, dtype=torch.int32, device=device)
    order_rows(slot_tensor(slots, device), chunk_rows, chunks, perm_N)
    perm, want = naive_chunks(slots, chunk_rows)
    assert perm_N.tolist() == perm
    count = int(chunks.count_1)
    got = list(zip(chunks.start_C.tolist(), chunks.rows_C.tolist(), chunks.slot_C.tolist(), strict=True))
    assert got[:count] == want
    assert all(rows == 0 and slot == -1 for _, rows, slot in got[count : len(slots)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 5000), max_tokens=st.integers(1, 5000), slots=st.integers(1, 9), seed=st.integers(0, 99))
def test_chunks_fit_the_capacity(tokens, max_tokens, slots, seed):
    tokens = min(tokens, max_tokens)
    capacity = PrefillCapacity(
        max_tokens=max_tokens, max_requests=max_tokens, full_max_requests=max_tokens, slots=slots, max_rank=8
    )
    drawn = torch.randint(-1, slots, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    _, chunks = naive_chunks(drawn, csgmv_chunk_rows(tokens))
    assert len(chunks) <= capacity.csgmv_segments(tokens) <= chunk_capacity(capacity)
