"""Base product and LoRA in one: equals the naive truth for packed batches, in either order of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dense_common import (
    DEVICES,
    TOLERANCE,
    make_bank,
    randn,
    relative_error,
    run_tiles,
    slot_tensor,
    sorted_tiles,
)
from moelora.errors import ConfigError
from moelora_kernels.ops import lora_gemm as lora_gemm_op
from moelora_kernels.ops.dense_lora import scratch_numel
from moelora_kernels.ops.invariant_gemm import LIST_ROWS, GemmConfig, invariant_gemm
from moelora_kernels.ops.lora_gemm import SlotBlocks, joined, lora_gemm, most_entries, naive_lora_gemm, plan_blocks


def make_blocks(lengths: list[int], slots: list[int], device: str) -> SlotBlocks:
    flat = [slot for length, slot in zip(lengths, slots, strict=True) for _ in range(length)]
    first, slot = (
        torch.from_numpy(part).to(device) for part in plan_blocks(lengths, slots, -(-len(flat) // LIST_ROWS))
    )
    return SlotBlocks(slot_tensor(flat, device), first, slot)


def check(lengths, slots, ranks, width_in, widths, dtype, device, *, order="runs", bias=False, config=None, join=False):
    blocks = make_blocks(lengths, slots, device)
    flat = blocks.token_slot_T.tolist()
    rows = run_tiles(flat, 16, device) if order == "runs" else sorted_tiles(flat, device, 16)
    banks = [make_bank(ranks, width_in, n, seed=n, dtype=dtype, device=device) if n != 7 else None for n in widths]
    x_TK = randn(len(flat), width_in, seed=1, dtype=dtype, device=device)
    weights = [randn(n, width_in, seed=n + 1, dtype=dtype, device=device) / width_in**0.5 for n in widths]
    biases = [randn(n, seed=n + 2, dtype=dtype, device=device) if bias else None for n in widths]
    if join:
        weights = list(torch.cat(weights).split(widths))
        biases = list(torch.cat(biases).split(widths)) if bias else biases
    scratch = torch.full((scratch_numel(len(flat), max([1, *ranks])),), float("nan"), dtype=dtype, device=device)
    outs = lora_gemm(x_TK, weights, biases, banks, rows, blocks, scratch=scratch, config=config)
    for out, weight, one_bias, one in zip(outs, weights, biases, banks, strict=True):
        assert out.shape == (len(flat), weight.shape[0])
        if flat:
            want = naive_lora_gemm(x_TK, weight, one_bias, one, blocks.token_slot_T)
            assert relative_error(out, want) < TOLERANCE[dtype]
    return x_TK, weights, outs, blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["runs", "sorted"])
def test_ragged_requests_of_mixed_ranks(device, dtype, order):
    lengths, slots = [3, 60, 70, 1, 5, 4], [0, 1, -1, 2, 0, 1]
    check(lengths, slots, [8, 70, 0], 40, [24, 7, 33], dtype, device, order=order, bias=True)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(1, 70), st.integers(-1, 2)), max_size=5),
    ranks=st.lists(st.sampled_from([0, 1, 16, 19]), min_size=3, max_size=3),
    width_in=st.integers(1, 40),
    width=st.integers(1, 40),
    order=st.sampled_from(["runs", "sorted"]),
)
def test_any_batch(requests, ranks, width_in, width, order):
    lengths, slots = [n for n, _ in requests], [s for _, s in requests]
    check(lengths, slots, ranks, width_in, [width], torch.float32, DEVICES[0], order=order)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_rows_own(device, dtype):
    """Whatever the tile and the neighbours; a base row has the bits of the product without LoRA."""
    block_k = 32 if dtype == torch.float32 else 64
    arguments = ([20, 9, 4], [0, -1, 1], [5, 18], 40, [30], dtype, device)
    x_TK, weights, (whole,), blocks = check(*arguments)
    for block_m in (16, 64):
        config = GemmConfig(block_m=block_m, block_n=16, block_k=block_k, warps=4, stages=2)
        assert torch.equal(whole, check(*arguments, order="sorted", config=config)[2][0])
    base = blocks.token_slot_T < 0
    assert torch.equal(whole[base], invariant_gemm(x_TK, weights[0])[base])
    bank = make_bank([5, 18], 40, 30, seed=30, dtype=dtype, device=device)
    for row, slot in ((0, 0), (19, 0), (32, 1)):
        (alone,) = lora_gemm(x_TK[row : row + 1], weights, [None], [bank], run_tiles([slot], 16, device),
                             make_blocks([1], [slot], device))  # fmt: skip
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("device", DEVICES)
def test_through_tensor_descriptors(device):
    config = GemmConfig(block_m=64, block_n=64, block_k=64, warps=4, stages=2, bulk=True)
    arguments = ([70, 9, 61], [0, -1, 1], [5, 18], 72, [64, 40], torch.bfloat16, device)
    for got, want in zip(check(*arguments, config=config)[2], check(*arguments)[2], strict=True):
        assert torch.equal(got, want)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(requests=st.lists(st.tuples(st.integers(1, 300), st.integers(-1, 3)), max_size=12))
def test_blocks_list_each_slot_they_meet_once(requests):
    lengths, slots = [n for n, _ in requests], [s for _, s in requests]
    flat = [slot for length, slot in requests for _ in range(length)]
    count = -(-len(flat) // LIST_ROWS)
    first, slot = plan_blocks(lengths, slots, count + 2)
    for i in range(count):
        met = sorted(set(flat[i * LIST_ROWS : (i + 1) * LIST_ROWS]) - {-1})
        assert slot[first[i] : first[i + 1]].tolist() == met
    assert first[count] == first[-1] == slot.size <= most_entries(len(flat), len(requests), 4)


def test_a_bank_of_another_dtype_is_refused():
    device = DEVICES[0]
    bank = make_bank([4], 16, 12, seed=1, dtype=torch.bfloat16, device=device)
    x_TK, w = randn(3, 16, seed=1, device=device), randn(12, 16, seed=2, device=device)
    with pytest.raises(ConfigError, match="a bank in the dtype of the activations"):
        lora_gemm(x_TK, [w], [None], [bank], run_tiles([0] * 3, 16, device), make_blocks([3], [0], device))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [[40], [40, 24], [24, 40, 8], [16, 24, 8, 40]])
def test_weights_behind_one_another_take_one_launch(monkeypatch, widths, bias):
    """Bulk copies, as on a GPU; the same bits as one projection after the other."""
    config = GemmConfig(block_m=32, block_n=16, block_k=64, warps=4, stages=2, group_m=2, bulk=True, flatten=False)
    arguments = ([20, 150, 9, 4], [0, -1, 1, 2], [5, 18, 40], 72, widths, torch.bfloat16, DEVICES[0])
    _, _, apart, _ = check(*arguments, bias=bias, config=config)
    launches = []
    one_by_one = lora_gemm_op._one_by_one
    monkeypatch.setattr(lora_gemm_op, "_one_by_one", lambda *a: launches.append(a) or one_by_one(*a))
    _, _, together, _ = check(*arguments, bias=bias, config=config, join=True)
    assert not launches
    for one, other in zip(apart, together, strict=True):
        assert torch.equal(one, other)


def test_joined_refuses_what_lies_apart():
    whole = torch.arange(24.0).view(6, 4)
    assert torch.equal(joined([whole[:2], whole[2:5]]), whole[:5])
    for apart in ([whole[:2], whole[3:]], [whole[2:], whole[:2]], [whole[:2], None], [whole[:, :2], whole[:, 2:]]):
        assert joined(apart) is None
    # Two storages that are neighbours in memory.
    memory = bytearray(96)
    halves = [torch.frombuffer(memory, dtype=torch.float32, count=12, offset=at).view(3, 4) for at in (0, 48)]
    assert halves[0].data_ptr() + 48 == halves[1].data_ptr()
    assert joined(halves) is None
