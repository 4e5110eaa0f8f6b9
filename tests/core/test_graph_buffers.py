"""What captured graphs read: refreshed in place by every batch, and of one phase alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelora import BASE_ADAPTER, Phase
from moelora.backends.base import PhaseError
from moelora.backends.torch_reference import TorchBackend
from moelora.batching.packing import pack
from moelora.batching.sequences import Sequence
from moelora.capacity import PrefillCapacity
from moelora.graphs.buffers import StaticInputs
from moelora.types import BASE_SLOT


def capacity(**changes):
    return PrefillCapacity(
        **{"max_tokens": 32, "max_requests": 8, "full_max_requests": 6, "slots": 2, "max_rank": 4, **changes}
    )


def packed(lengths, slots):
    names = {BASE_SLOT: BASE_ADAPTER, 0: "a", 1: "b"}
    sequences = [
        Sequence(request=i, adapter=names[s], token_ids=(i + 1,) * n, runs=(), top_k=0)
        for i, (n, s) in enumerate(zip(lengths, slots))
    ]
    return pack(sequences, {"a": 0, "b": 1}, torch.device("cpu"))


lengths_and_slots = st.lists(st.tuples(st.integers(1, 6), st.integers(-1, 1)), min_size=1, max_size=5)


filled = st.tuples(lengths_and_slots, st.sampled_from([30, 31, 32]))


@given(filled, filled)
def test_static_buffers_show_nothing_of_an_earlier_batch(first, second):
    inputs, backend = StaticInputs(Phase.PREFILL, capacity(), torch.device("cpu")), TorchBackend()
    backend.init_graph_metadata(Phase.PREFILL, capacity(), torch.device("cpu"))
    bucket = second[1]
    views = inputs.ids(bucket), inputs.positions(bucket), inputs.boundaries(bucket)  # as a graph has baked them in
    for rows, into in (first, second):
        batch = packed(*zip(*rows))
        segments = inputs.fill(batch, into)
        meta = backend.prepare_batch(batch, phase=Phase.PREFILL, bucket=into)
    live = batch.num_tokens
    ids_1T, positions_1T, boundaries_S1 = views
    assert ids_1T[0].tolist() == batch.input_ids_T.tolist() + [0] * (bucket - live)
    assert positions_1T[0].tolist() == batch.position_ids_T.tolist() + [0] * (bucket - live)
    assert len(boundaries_S1) == 6 + 1
    ends = batch.cu_seqlens_S1.tolist()
    assert boundaries_S1.tolist() == ends + [live] * (7 - len(ends))
    assert segments.cu_seqlens_S1.tolist() == ends
    assert (segments.lengths, segments.longest) == (batch.lengths, max(batch.lengths))
    assert meta.token_slot_T[:live].tolist() == batch.token_slot_T.tolist()
    assert set(meta.token_slot_T[live:].tolist()) <= {BASE_SLOT}


def test_live_boundaries_of_more_requests_than_a_full_graph_has_slots():
    """As in a breakable graph, whose attention reads them."""
    inputs = StaticInputs(Phase.PREFILL, capacity(), torch.device("cpu"))
    batch = packed([1, 2, 3, 1, 1, 4, 2, 1], [0] * 8)
    assert inputs.fill(batch, 16).cu_seqlens_S1.tolist() == batch.cu_seqlens_S1.tolist()
    assert inputs.boundaries(16).tolist() == batch.cu_seqlens_S1.tolist()[:7]


def test_phases_do_not_share_buffers():
    backend = TorchBackend()
    backend.init_graph_metadata(Phase.PREFILL, capacity(), torch.device("cpu"))
    with pytest.raises(PhaseError, match="decode"):
        backend.prepare_batch(packed([3], [0]), phase=Phase.DECODE, bucket=16)
    with pytest.raises(PhaseError, match="made already"):
        backend.init_graph_metadata(Phase.PREFILL, capacity(), torch.device("cpu"))
    backend.init_graph_metadata(Phase.DECODE, capacity(), torch.device("cpu"))
    prefill = backend.prepare_batch(packed([3], [0]), phase=Phase.PREFILL, bucket=16)
    decode = backend.prepare_batch(packed([1], [1]), phase=Phase.DECODE, bucket=16)
    assert prefill.token_slot_T.data_ptr() != decode.token_slot_T.data_ptr()
    assert prefill.token_slot_T[:3].tolist() == [0, 0, 0]
