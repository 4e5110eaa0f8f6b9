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


@given(lengths_and_slots, lengths_and_slots)
def test_static_buffers_show_nothing_of_an_earlier_batch(first, second):
    inputs, backend = StaticInputs(Phase.PREFILL, capacity(), torch.device("cpu")), TorchBackend()
    backend.init_graph_metadata(Phase.PREFILL, capacity(), torch.device("cpu"))
    address = inputs.ids(32).data_ptr()
    for rows in (first, second):
        batch = packed(*zip(*rows))
        inputs.fill(batch, 32)
        meta = backend.prepare_batch(batch, phase=Phase.PREFILL, bucket=32)
    live = batch.num_tokens
    assert inputs.ids(32).data_ptr() == address
    assert inputs.ids(32)[0, :live].tolist() == batch.input_ids_T.tolist()
    assert not inputs.ids(32)[0, live:].any()
    assert not inputs.positions(32)[0, live:].any()
    boundaries = inputs.boundaries(32).tolist()
    assert boundaries[: len(second) + 1] == batch.cu_seqlens_S1.tolist()
    assert set(boundaries[len(second) :]) == {live}
    assert meta.token_slot_T[:live].tolist() == batch.token_slot_T.tolist()
    assert set(meta.token_slot_T[live:].tolist()) <= {BASE_SLOT}


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
