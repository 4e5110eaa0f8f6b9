"""Routes: the device's order and tiles equal plain torch's, exactly, on whatever a batch may hold."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moelora.errors import ConfigError
from moelora_kernels.ops.routes import RouteBuffers, build_routes, max_tiles, order_tokens, token_routes
from moelora_kernels.ops.routes.naive import naive_order, naive_tiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])


def make_buffers(T, K, E, L, block_m, poison=True):
    buffers = RouteBuffers(max_tokens=T, top_k=K, num_experts=E, num_slots=L, block_m=block_m, device=DEVICE)
    if poison:
        for value in vars(buffers).values():
            if isinstance(value, torch.Tensor) and value is not buffers.zeros_T1:
                value.fill_(-(2**30))
    return buffers


def check(ids_TK, slot_T, E, L, block_m, *, live=None, buffers=None, has_lora=True):
    T, K = ids_TK.shape
    buffers = buffers or make_buffers(T + 3, K, E, L, block_m)
    before = buffers.sorted_P[T * K :].clone()
    in_tiles = max_tiles(T * K, E, block_m) * block_m
    behind = [x[in_tiles:].clone() for x in (buffers.tile_pairs, buffers.tile_row_slots)]
    num_live = None if live is None else torch.tensor([live], dtype=torch.int32, device=DEVICE)
    routes = build_routes(
        ids_TK.to(DEVICE),
        slot_T.to(DEVICE),
        num_experts=E,
        block_m=block_m,
        has_lora=has_lora,
        buffers=buffers,
        num_live=num_live,
    )
    seen = slot_T if has_lora else torch.full_like(slot_T, -1)
    order_P, counts = naive_order(ids_TK.cpu(), seen, E, L, T if live is None else live)
    alive = sum(counts)
    assert routes.sorted_P[:alive].cpu().tolist() == order_P[:alive].tolist()
    assert sorted(routes.sorted_P.cpu().tolist()) == list(range(T * K))
    assert routes.expert_rows[:E].cpu().tolist() == counts
    assert routes.row_slot_P[:alive].cpu().tolist() == seen[order_P[:alive] // K].tolist()
    expected = naive_tiles(order_P, seen, counts, K, block_m)
    assert routes.num_tiles == max_tiles(T * K, E, block_m) >= len(expected)
    for i, (expert, first, rows, slots) in enumerate(expected):
        assert routes.tile_expert_M[i].item() == expert
        assert routes.tile_first_M[i].item() == first
        assert routes.tile_rows_M[i].item() == rows
        pairs = order_P[first : first + rows].tolist()
        assert routes.tile_pairs_MB[i].cpu().tolist() == pairs + pairs[:1] * (block_m - rows)
        if has_lora:
            count = routes.tile_num_slots_M[i].item()
            assert routes.tile_slots_MC[i, :count].cpu().tolist() == slots
            of_rows = seen[order_P[first : first + rows] // K].tolist()
            assert routes.tile_row_slots_MB[i].cpu().tolist() == of_rows + [-1] * (block_m - rows)
    assert (routes.tile_expert_M[len(expected) :] == -1).all()
    assert (routes.tile_rows_M[len(expected) :] == 0).all()
    assert (buffers.sorted_P[T * K :] == before).all()
    assert torch.equal(buffers.tile_pairs[in_tiles:], behind[0])
    assert torch.equal(buffers.tile_row_slots[in_tiles:], behind[1])
    return buffers


@FEW
@given(
    T=st.sampled_from([1, 2, 17, 130, 300]),
    K=st.integers(1, 4),
    E=st.sampled_from([1, 4, 8, 130]),
    L=st.sampled_from([1, 3, 64]),
    block_m=st.sampled_from([16, 64]),
    live=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_order_and_tiles_equal_plain_torch(T, K, E, L, block_m, live, seed):
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-1, E + 1, (T, K), generator=g)
    slot_T = torch.randint(-1, L, (T,), generator=g, dtype=torch.int32)
    check(ids_TK, slot_T, E, L, block_m, live=round(live * T))


def test_all_tokens_on_one_expert_and_int32_ids():
    ids_TK = torch.full((600, 1), 5, dtype=torch.int32)
    slot_T = torch.arange(600, dtype=torch.int32) % 3 - 1
    check(ids_TK, slot_T, 8, 2, 64)


def test_512_experts_and_64_slots():
    g = torch.Generator().manual_seed(0)
    ids_TK = torch.randint(0, 512, (70, 4), generator=g)
    slot_T = torch.randint(-1, 64, (70,), generator=g, dtype=torch.int32)
    check(ids_TK, slot_T, 512, 64, 16)


def test_no_pair_has_an_expert():
    check(torch.full((9, 2), 99), torch.zeros(9, dtype=torch.int32), 4, 1, 16)


def test_all_base_skips_the_slots():
    check(torch.randint(0, 4, (40, 2)), torch.zeros(40, dtype=torch.int32), 4, 1, 16, has_lora=False)


def test_a_small_batch_after_a_large_one_sees_nothing_of_it():
    buffers = make_buffers(200, 2, 6, 4, 16)
    g = torch.Generator().manual_seed(1)
    for T in (200, 3, 40):
        slot_T = torch.randint(-1, 4, (T,), generator=g, dtype=torch.int32)
        check(torch.randint(0, 6, (T, 2), generator=g), slot_T, 6, 4, 16, buffers=buffers)


def test_a_token_with_an_unknown_slot_is_computed_by_nobody():
    slot_T = torch.tensor([0, 7, -5, -1], dtype=torch.int32)
    buffers = check(torch.zeros(4, 1, dtype=torch.int64), slot_T, 1, 2, 16)
    order_T = order_tokens(slot_T.to(DEVICE), buffers=buffers, num_live=None)
    assert order_T.cpu().tolist() == [3, 0, 1, 2]


def test_token_routes_are_tiles_of_tokens_by_slot():
    buffers = make_buffers(50, 1, 1, 3, 16)
    slot_T = (torch.arange(50, dtype=torch.int32) % 4 - 1).to(DEVICE)
    live = torch.tensor([37], dtype=torch.int32, device=DEVICE)
    routes = token_routes(slot_T, block_m=16, buffers=buffers, num_live=live)
    expected = torch.argsort(slot_T[:37].cpu(), stable=True)
    assert routes.sorted_P[:37].cpu().tolist() == expected.tolist()
    assert routes.tile_rows_M.cpu().tolist() == [16, 16, 5, 0]


def test_more_tokens_than_capacity_are_refused():
    buffers = make_buffers(8, 2, 4, 1, 16)
    with pytest.raises(ConfigError, match="9 tokens exceed the 8"):
        build_routes(
            torch.zeros(9, 2, dtype=torch.int64, device=DEVICE),
            torch.zeros(9, dtype=torch.int32, device=DEVICE),
            num_experts=4,
            block_m=16,
            has_lora=True,
            buffers=buffers,
        )
