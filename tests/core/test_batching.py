"""From requests to batches: expansion, rounds, budgets, and what the model sees."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelora.batching.packing import pack
from moelora.batching.planner import BatchLimits, assign_slots, plan
from moelora.batching.sequences import NO_TARGET, PROMPT, Sequence, expand
from moelora.types import BASE_ADAPTER, BASE_SLOT, Request


def sequence(number, adapter, length):
    return Sequence(request=number, adapter=adapter, token_ids=tuple(range(length)), rows=(), top_k=0)


LIMITS = BatchLimits(max_tokens=40, max_sequences=5, max_adapters=2)
adapters = st.sampled_from([BASE_ADAPTER, "a", "b", "c", "d"])


@given(st.lists(st.tuples(adapters, st.integers(1, 50)), max_size=40))
def test_plan_runs_everything_once_within_limits(given_rows):
    sequences = [sequence(i, adapter, length) for i, (adapter, length) in enumerate(given_rows)]
    batches = list(plan(sequences, LIMITS))
    assert sorted(s.request for b in batches for s in b.sequences) == list(range(len(sequences)))
    for batch in (b.sequences for b in batches):
        assert len(batch) <= LIMITS.max_sequences
        assert sum(s.num_tokens for s in batch) <= LIMITS.max_tokens or len(batch) == 1
        assert len({s.adapter for s in batch} - {BASE_ADAPTER}) <= LIMITS.max_adapters


@given(st.lists(st.tuples(adapters, st.integers(1, 50)), max_size=40))
def test_no_adapter_is_loaded_twice(given_rows):
    sequences = [sequence(i, adapter, length) for i, (adapter, length) in enumerate(given_rows)]
    residents: list[str | None] = [None, None]
    loads = []
    for batch in plan(sequences, LIMITS):
        needed = {s.adapter for s in batch.sequences}
        for name, slot in assign_slots(batch.adapters, residents).items():
            if name in needed and residents[slot] != name:
                residents[slot] = name
                loads.append(name)
    assert len(loads) == len(set(loads))


@pytest.mark.parametrize(("budget", "longest"), [(8192, 768), (2048, 768), (16384, 4096)])
def test_batches_are_full(budget, longest):
    """No batch but the last of a round is under 90 % full on a mix of lengths."""
    rng = random.Random(budget)
    sequences = [sequence(i, rng.choice(["a", "b", BASE_ADAPTER]), rng.randint(16, longest)) for i in range(2000)]
    batches = list(plan(sequences, BatchLimits(max_tokens=budget, max_sequences=budget, max_adapters=2)))
    filled = [sum(s.num_tokens for s in b.sequences) / budget for b in batches]
    assert min(filled[:-1]) >= 0.9
    assert max(filled) <= 1.0


def test_a_plan_is_a_pure_function_and_keeps_adapters_together():
    sequences = [sequence(i, "abcd"[i % 4], 1 + i % 7) for i in range(100)]
    one, two = (list(plan(sequences, LIMITS)) for _ in range(2))
    assert one == two
    for batch in one:
        order = [s.adapter for s in batch.sequences]
        assert len([k for k, _ in itertools.groupby(order)]) == len(set(order))


def test_assign_slots_keeps_residents_and_prefers_empty_slots():
    assert assign_slots(["b", "n"], ["a", "b", None]) == {"b": 1, "n": 2}
    assert assign_slots(["x", "y"], ["a", None, "y"]) == {"y": 2, "x": 1}


def test_one_token_has_only_its_next_token():
    (only,) = expand(0, Request(token_ids=[7]))
    assert [(r.position, r.target, r.choice) for r in only.rows] == [(0, NO_TARGET, PROMPT)]


def test_rows_predict_the_following_token():
    (only,) = expand(0, Request(token_ids=[7, 8, 9]))
    assert [(r.position, r.target) for r in only.rows] == [(0, 8), (1, 9), (2, NO_TARGET)]


def test_choices_read_all_but_their_last_token_and_share_equal_reads():
    first, second = expand(3, Request(token_ids=[5, 6], choices=[[1], [2, 3], [4]], top_k=2))
    assert first.token_ids == (5, 6)
    assert [(r.position, r.target, r.choice) for r in first.rows if r.choice != PROMPT] == [(1, 1, 0), (1, 4, 2)]
    assert second.token_ids == (5, 6, 2)
    assert [(r.position, r.target, r.choice) for r in second.rows] == [(1, 2, 1), (2, 3, 1)]
    assert (first.top_k, second.top_k) == (2, 0)


@given(st.lists(st.tuples(adapters, st.integers(1, 9)), min_size=1, max_size=9))
def test_packing_restarts_positions_and_names_every_token(given_rows):
    sequences = [sequence(i, adapter, length) for i, (adapter, length) in enumerate(given_rows)]
    slot_of = {name: i for i, name in enumerate("abcd")}
    batch = pack(sequences, slot_of, torch.device("cpu"))
    begin = 0
    for one in sequences:
        rows = slice(begin, begin + one.num_tokens)
        assert batch.position_ids_T[rows].tolist() == list(range(one.num_tokens))
        assert batch.input_ids_T[rows].tolist() == list(one.token_ids)
        assert set(batch.token_slot_T[rows].tolist()) == {slot_of.get(one.adapter, BASE_SLOT)}
        begin += one.num_tokens
    assert batch.cu_seqlens_S1.tolist()[-1] == begin == batch.num_tokens == len(batch.input_ids_T)
