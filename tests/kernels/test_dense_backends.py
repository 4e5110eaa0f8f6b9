"""The triton and csgmv backends: buffers per phase, refresh in place, handles, and the products of whole batches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import DEVICES, TOLERANCE, make_bank, randn, relative_error
from moelora.backends import get_backend
from moelora.backends.base import PhaseError
from moelora.batching.packing import pack_ids
from moelora.capacity import PrefillCapacity
from moelora.errors import ConfigError
from moelora.graphs.buffers import StaticInputs
from moelora.models.projections import _join
from moelora.types import PackedBatch, Phase
from moelora_kernels import tiled
from moelora_kernels.ops.dense_lora import naive_dense_lora, naive_embedding_lora
from moelora_kernels.ops.lora_gemm import few_rows, naive_lora_gemm

NAMES = ["triton", "csgmv"]
DEVICE = torch.device(DEVICES[0])


def capacity(max_tokens=64, requests=40, slots=3, rank=20) -> PrefillCapacity:
    return PrefillCapacity(
        max_tokens=max_tokens, max_requests=requests, full_max_requests=requests, slots=slots, max_rank=rank
    )


def make_batch(lengths: list[int], slots: list[int]) -> PackedBatch:
    return pack_ids([[i % 11 for i in range(length)] for length in lengths], slots, DEVICE)


def make_backend(name: str, **sizes):
    backend = get_backend(name)
    backend.init_graph_metadata(Phase.PREFILL, capacity(**sizes), DEVICE)
    return backend


def check_products(backend, meta, rows: int, ranks=(3, 20, 0)) -> None:
    """linear, fused_linear and embedding against the naive truth, for the token→slot map of the handle."""
    banks = [make_bank(list(ranks), 24, n, seed=n, dtype=torch.float32, device=str(DEVICE)) for n in (20, 9)]
    x_TI = randn(rows, 24, seed=1, device=str(DEVICE))
    outs = [randn(rows, n, seed=2, device=str(DEVICE)) for n in (20, 9)]
    wants = [out.clone() for out in outs]
    for want, bank in zip(wants, banks, strict=True):
        naive_dense_lora(x_TI, want, bank, meta.token_slot_T)
    third = outs[0].clone()
    backend.fused_linear(x_TI, [*outs, third], [*banks, None], meta)
    single = wants[0].clone()
    assert all(relative_error(got, want) < 1e-5 for got, want in zip(outs, wants, strict=True))
    naive_dense_lora(x_TI, single, banks[0], meta.token_slot_T)
    backend.linear(x_TI, outs[0], banks[0], meta)
    assert relative_error(outs[0], single) < 1e-5
    ids_T = torch.arange(rows, device=DEVICE) % 24
    got, want = third, third.clone()
    naive_embedding_lora(ids_T, want, banks[0], meta.token_slot_T)
    backend.embedding(ids_T, got, banks[0], meta)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bucket", [None, 32, 64])
def test_a_mixed_batch(name, bucket):
    backend = make_backend(name)
    meta = backend.prepare_batch(make_batch([3, 17, 1, 2], [0, 1, -1, 0]), phase=Phase.PREFILL, bucket=bucket)
    assert meta.has_lora
    assert meta.token_slot_T.shape == (bucket or 23,)
    assert set(meta.token_slot_T[23:].tolist()) <= {-1}
    check_products(backend, meta, bucket or 23)


@pytest.mark.parametrize("name", NAMES)
def test_refresh_is_in_place_and_leaves_nothing_of_a_larger_batch(name):
    backend = make_backend(name)
    batches = [([1] * 33, [i % 4 - 1 for i in range(33)]), ([2], [1]), ([40], [-1]), ([1] * 5, [0, 1, 0, -1, 2])]
    seen = set()
    for lengths, slots in [*batches, *batches[::-1]]:
        batch = make_batch(lengths, slots)
        meta = backend.prepare_batch(batch, phase=Phase.PREFILL, bucket=64)
        tiles = meta.private.rows.tiles
        seen.add((meta.token_slot_T.data_ptr(), tiles.start_C.data_ptr(), meta.private.scratch.data_ptr()))
        expected = batch.token_slot_T.tolist() + [-1] * (64 - batch.num_tokens)
        assert meta.token_slot_T.tolist() == expected
        assert meta.has_lora == any(slot >= 0 for slot in slots)
        check_products(backend, meta, 64)
    assert len(seen) == 1, "a buffer moved"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_graph_reads_goes_into_its_buffers_alone(name):
    """No tensors of the batch's own are made beside them: they would be one more copy, of which nothing is read."""
    backend, inputs = make_backend(name), StaticInputs(Phase.PREFILL, capacity(), DEVICE)
    batch = make_batch([3, 17, 1, 2], [0, 1, -1, 0])
    segments = inputs.fill(batch, 64)
    meta = backend.prepare_batch(batch, phase=Phase.PREFILL, bucket=64)
    assert "_sent" not in vars(batch)
    assert inputs.ids(64)[0, :23].tolist() == batch.input_ids_T.tolist()
    assert segments.cu_seqlens_S1.tolist() == batch.cu_seqlens_S1.tolist()
    assert meta.token_slot_T[:23].tolist() == batch.token_slot_T.tolist()


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 2)), min_size=1, max_size=7),
    name=st.sampled_from(NAMES),
    padded=st.booleans(),
)
def test_any_batch(requests, name, padded):
    backend = make_backend(name)
    batch = make_batch([n for n, _ in requests], [s for _, s in requests])
    meta = backend.prepare_batch(batch, phase=Phase.PREFILL, bucket=64 if padded else None)
    check_products(backend, meta, meta.token_slot_T.shape[0])


@pytest.mark.parametrize("name", NAMES)
def test_loose_rows(name):
    backend = get_backend(name)
    slot_N = torch.tensor([2, 0, -1, 0, 1, 1, -1], dtype=torch.int32, device=DEVICE)
    check_products(backend, backend.rows_metadata(slot_N, has_lora=True), 7)
    check_products(backend, backend.rows_metadata(torch.full_like(slot_N, -1), has_lora=False), 7)
    check_products(backend, backend.rows_metadata(slot_N[:0], has_lora=True), 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_handle_prepared_from_base_rows_serves_adapters_after_a_refresh(name):
    """What a graph does that was captured from base rows: the old handle's launches, with refreshed buffers."""
    backend = make_backend(name)
    captured = backend.prepare_batch(make_batch([20], [-1]), phase=Phase.PREFILL, bucket=64)
    assert not captured.has_lora
    fresh = backend.prepare_batch(make_batch([20], [1]), phase=Phase.PREFILL, bucket=64)
    check_products(backend, replace(captured, has_lora=True), 64)
    check_products(backend, fresh, 64)


@pytest.mark.parametrize("name", NAMES)
def test_the_variant_without_lora_touches_nothing(name):
    backend = make_backend(name)
    meta = backend.prepare_batch(make_batch([20], [1]), phase=Phase.PREFILL, bucket=64)
    bank = make_bank([3, 20], 24, 20, seed=1, dtype=torch.float32, device=str(DEVICE))
    out = torch.zeros(64, 20, device=DEVICE)
    backend.linear(randn(64, 24, seed=1, device=str(DEVICE)), out, bank, replace(meta, has_lora=False))
    assert not bool(out.any())


@pytest.mark.parametrize("name", NAMES)
def test_phases_own_their_buffers(name):
    backend = make_backend(name)
    with pytest.raises(PhaseError, match="made already"):
        backend.init_graph_metadata(Phase.PREFILL, capacity(), DEVICE)
    with pytest.raises(PhaseError, match="phase decode has no metadata"):
        backend.prepare_batch(make_batch([2], [0]), phase=Phase.DECODE, bucket=16)
    backend.init_graph_metadata(Phase.DECODE, capacity(max_tokens=16), DEVICE)
    prefill = backend.prepare_batch(make_batch([2], [0]), phase=Phase.PREFILL, bucket=16)
    decode = backend.prepare_batch(make_batch([1], [1]), phase=Phase.DECODE, bucket=16)
    assert prefill.private.scratch.data_ptr() != decode.private.scratch.data_ptr()
    assert prefill.token_slot_T[0] == 0
    assert decode.token_slot_T[0] == 1
    bank = make_bank([3, 20], 24, 20, seed=1, dtype=torch.float32, device=str(DEVICE))
    x_TI, out = randn(16, 24, seed=1, device=str(DEVICE)), torch.zeros(16, 20, device=DEVICE)
    with pytest.raises(PhaseError, match="buffers of phase prefill were handed to phase decode"):
        backend.linear(x_TI, out, bank, replace(prefill, phase=Phase.DECODE))
    with pytest.raises(PhaseError, match="not those of phase prefill of this backend"):
        make_backend(name).linear(x_TI, out, bank, prefill)
    with pytest.raises(PhaseError, match="not made by backend"):
        backend.linear(x_TI, out, bank, replace(prefill, private=None))
    with pytest.raises(PhaseError, match="no expert buffers"):
        backend.experts(x_TI, out, out, None, None, None, prefill)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_over_capacity_is_refused_with_the_reason_of_admission(name):
    backend = make_backend(name, max_tokens=32, requests=2)
    with pytest.raises(ConfigError, match="more requests than the graph has request slots"):
        backend.prepare_batch(make_batch([1, 1, 1], [0, 0, 0]), phase=Phase.PREFILL, bucket=32)
    with pytest.raises(ConfigError, match="more tokens than the largest captured bucket"):
        backend.prepare_batch(make_batch([20], [0]), phase=Phase.PREFILL, bucket=16)
    with pytest.raises(ConfigError, match="bucket 64 is over max_tokens 32"):
        backend.prepare_batch(make_batch([20], [0]), phase=Phase.PREFILL, bucket=64)
    with pytest.raises(ConfigError, match="rank 300 is over 256"):
        get_backend(name).init_graph_metadata(Phase.PREFILL, capacity(rank=300), DEVICE)


@pytest.mark.parametrize("name", NAMES)
def test_no_adapters_at_all(name):
    backend = make_backend(name, slots=0, rank=0)
    meta = backend.prepare_batch(make_batch([4], [-1]), phase=Phase.PREFILL, bucket=16)
    assert not meta.has_lora


@pytest.mark.parametrize("rides", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bucket", [None, 64])
def test_projections(name, bucket, rides, monkeypatch):
    """Base products and LoRA, added or in one: as on a GPU, where large batches ride."""
    if rides:
        monkeypatch.setattr(tiled, "RIDE_ROWS", 1)
        monkeypatch.setattr(tiled, "RIDE_WIDTH", 1)
        monkeypatch.setattr(tiled, "bulk_copies", lambda *matrices: True)
        monkeypatch.setattr(tiled.TiledBackend, "fused_linear", None)
    backend = make_backend(name)
    banks = [make_bank([3, 20, 0], 24, n, seed=n, dtype=torch.bfloat16, device=str(DEVICE)) for n in (20, 9)]
    weights = [randn(n, 24, seed=n + 1, dtype=torch.bfloat16, device=str(DEVICE)) for n in (20, 9)]
    biases = [randn(20, seed=3, dtype=torch.bfloat16, device=str(DEVICE)), None]
    for lengths, slots in (([3, 17, 1, 2], [0, 1, -1, 0]), ([1] * 30, [i % 4 - 1 for i in range(30)])):
        meta = backend.prepare_batch(make_batch(lengths, slots), phase=Phase.PREFILL, bucket=bucket)
        x_TI = randn(meta.token_slot_T.shape[0], 24, seed=4, dtype=torch.bfloat16, device=str(DEVICE))
        outs = backend.projections(x_TI, weights, biases, banks, meta)
        for out, weight, bias, bank in zip(outs, weights, biases, banks, strict=True):
            want = naive_lora_gemm(x_TI, weight, bias, bank, meta.token_slot_T)
            assert relative_error(out, want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bucket", [None, 64])
def test_projections_of_few_rows_share_a_base_product(name, bucket, with_bias, monkeypatch):
    backend = make_backend(name)
    widths = (20, 9, 7)
    banks = [make_bank([3, 20, 0], 24, n, seed=n, dtype=torch.float32, device=str(DEVICE)) for n in widths]
    weights = [torch.nn.Parameter(randn(n, 24, seed=n + 1, device=str(DEVICE))) for n in widths]
    biases = [torch.nn.Parameter(randn(n, seed=n + 2, device=str(DEVICE))) if with_bias else None for n in widths]
    meta = backend.prepare_batch(make_batch([3, 17, 1, 2], [0, 1, -1, 0]), phase=Phase.PREFILL, bucket=bucket)
    x_TI = randn(meta.token_slot_T.shape[0], 24, seed=4, device=str(DEVICE))
    with torch.no_grad():
        apart = backend.projections(x_TI, weights, biases, banks, meta, rows_apart=True)  # each weight in its own place
        _join(weights)
        assert all(out.is_contiguous() for out in [*apart, *backend.projections(x_TI, weights, biases, banks, meta)])
        if with_bias:
            _join(biases)
        outs = backend.projections(x_TI, weights, biases, banks, meta, rows_apart=True)
        assert {out.stride() for out in outs} == {(36, 1)}
        for out, other, weight, bias, bank in zip(outs, apart, weights, biases, banks, strict=True):
            want = naive_lora_gemm(x_TI, weight, bias, bank, meta.token_slot_T)
            assert relative_error(out, want) < TOLERANCE[torch.float32]
            assert relative_error(other, want) < TOLERANCE[torch.float32]
        for rule, value in (("RIDE_ROWS", 1), ("joined_projections", lambda *given, **how: None)):
            with monkeypatch.context() as patch:
                patch.setattr(tiled, rule, value)
                separate = backend.projections(x_TI, weights, biases, banks, meta, rows_apart=True)
            assert all(out.is_contiguous() for out in separate)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bucket", [None, 64])
def test_factors_of_all_slots_behind_the_weights_of_few_rows(name, bucket, count, monkeypatch):
    """A x for every slot comes out of the base product; a slot's columns reach its own rows alone."""
    monkeypatch.setattr(few_rows, "MOST_FACTORS", 100)
    monkeypatch.setattr("moelora_kernels.ops.dense_lora.shrink_kernel", None)
    monkeypatch.setattr("moelora_kernels.ops.dense_lora.shrink_narrow_kernel", None)
    backend = make_backend(name)
    widths, bank_ranks = (20, 9, 7)[:count], (20, 3, 17)
    banks = [
        make_bank([3, min(r, 20), 0], 24, n, seed=n, bank_rank=r, dtype=torch.float32, device=str(DEVICE))
        for n, r in zip(widths, bank_ranks, strict=False)
    ]
    for bank in banks:
        bank.a_LRI[2] = float("nan")  # a slot that no row of the batch has
    weights = [torch.nn.Parameter(randn(n, 24, seed=n + 1, device=str(DEVICE))) for n in widths]
    for lengths, slots in (([3, 17, 1, 2], [0, 1, -1, 0]), ([5], [-1]), ([9, 9], [1, 1])):
        meta = backend.prepare_batch(make_batch(lengths, slots), phase=Phase.PREFILL, bucket=bucket)
        meta = replace(meta, has_lora=True) if bucket else meta
        x_TI = randn(meta.token_slot_T.shape[0], 24, seed=4, device=str(DEVICE))
        with torch.no_grad():
            _join([*weights, *(bank.a_LRI for bank in banks)])
            outs = backend.projections(x_TI, weights, [None] * count, banks, meta, rows_apart=True)
            columns = sum(widths) + (sum(3 * bank.a_LRI.shape[1] for bank in banks) if meta.has_lora else 0)
            assert {out.stride() for out in outs} == {(columns, 1)}
            for out, weight, bank in zip(outs, weights, banks, strict=True):
                want = naive_lora_gemm(x_TI, weight, None, bank, meta.token_slot_T)
                assert relative_error(out, want) < TOLERANCE[torch.float32]


def test_projections_of_base_rows_are_the_base_product():
    backend = make_backend("triton")
    bank = make_bank([3], 24, 20, seed=1, dtype=torch.float32, device=str(DEVICE))
    meta = backend.prepare_batch(make_batch([5], [-1]), phase=Phase.PREFILL, bucket=64)
    x_TI, weight = randn(64, 24, seed=4, device=str(DEVICE)), randn(20, 24, seed=2, device=str(DEVICE))
    (out,) = backend.projections(x_TI, [weight], [None], [bank], meta)
    assert torch.equal(out, torch.nn.functional.linear(x_TI, weight))
