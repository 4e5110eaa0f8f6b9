"""From requests to batches: expansion, rounds, budgets, and what the model sees."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelora.batching import planner
from moelora.batching.packing import pack
from moelora.batching.planner import BatchLimits, PlannedBatch, plan
from moelora.batching.sequences import NO_TARGET, PROMPT, ScoredRun, Sequence, expand
from moelora.batching.slots import SlotSchedule, look_ahead
from moelora.types import BASE_ADAPTER, BASE_SLOT, Request


def sequence(number, adapter, length):
    return Sequence(request=number, adapter=adapter, token_ids=tuple(range(length)), runs=(), top_k=0)


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


@given(
    st.lists(st.tuples(adapters, st.integers(1, 60)), max_size=40),
    st.integers(1, 4),
    st.sampled_from([1, 3, 9]),
    st.sampled_from([0, 1, 3, 128]),
)
def test_each_adapter_is_loaded_once_in_a_pass(given_rows, slots, most, lookahead):
    """Whatever is passed over to fill a batch: no adapter comes back after its slot was given away."""
    sequences = [sequence(i, adapter, length) for i, (adapter, length) in enumerate(given_rows)]
    limits = BatchLimits(max_tokens=40, max_sequences=most, max_adapters=slots)
    schedule = SlotSchedule(slots)
    tenants: dict[int, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_LOOKAHEAD", lookahead)
        batches = list(plan(sequences, limits))
    assert sorted(s.request for b in batches for s in b.sequences) == list(range(len(sequences)))
    loads = 0
    for batch in batches:
        slot_of = schedule.place(batch)
        assert {s.adapter for s in batch.sequences} - {BASE_ADAPTER} <= set(slot_of)
        assert len(set(slot_of.values())) == len(slot_of) <= slots
        loads += sum(tenants.get(slot) != name for name, slot in slot_of.items())
        tenants.update({slot: name for name, slot in slot_of.items()})
    assert loads == schedule.loads == len({s.adapter for s in sequences} - {BASE_ADAPTER})


def test_one_adapter_after_the_other_so_that_slots_come_free_early():
    rng = random.Random(4)
    sequences = [sequence(i, f"a{rng.randrange(50)}", rng.randint(16, 768)) for i in range(10_000)]
    batches = list(plan(sequences, BatchLimits(max_tokens=8192, max_sequences=8192, max_adapters=4)))
    filled = [sum(s.num_tokens for s in b.sequences) / 8192 for b in batches]
    assert min(filled[:-1]) >= 0.9
    assert sum(len(b.adapters) for b in batches) / len(batches) < 1.5
    schedule = SlotSchedule(4)
    for batch in batches:
        schedule.place(batch)
    assert schedule.loads == 50


def test_the_base_comes_first():
    sequences = [sequence(i, ["a", "b", BASE_ADAPTER][i % 3], 9) for i in range(30)]
    order = [s.adapter for b in plan(sequences, LIMITS) for s in b.sequences]
    assert [name for name, _ in itertools.groupby(order)] == [BASE_ADAPTER, "a", "b"]


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


def test_slots_keep_their_tenants_and_give_way_in_the_order_they_were_left():
    schedule = SlotSchedule(3)

    def place(*names):
        return schedule.place(PlannedBatch(sequences=(), adapters=names))

    assert place("a", "b") == {"a": 0, "b": 1}
    assert place("b", "c") == {"b": 1, "c": 2}
    assert place("d", "c") == {"d": 0, "c": 2}
    assert place("e") == {"e": 1}
    assert schedule.loads == 5


def test_look_ahead():
    assert list(look_ahead("abcd", 2)) == [("a", ["b", "c"]), ("b", ["c", "d"]), ("c", ["d"]), ("d", [])]
    assert list(look_ahead("", 2)) == []


def test_one_token_has_only_its_next_token():
    (only,) = expand(0, Request(token_ids=[7]))
    assert only.runs == (ScoredRun(0, (NO_TARGET,), PROMPT),)


def test_rows_predict_the_following_token():
    (only,) = expand(0, Request(token_ids=[7, 8, 9]))
    assert only.runs == (ScoredRun(0, [8, 9], PROMPT), ScoredRun(2, (NO_TARGET,), PROMPT))
    assert only.num_rows == 3


def test_choices_read_all_but_their_last_token_and_share_equal_reads():
    first, second = expand(3, Request(token_ids=[5, 6], choices=[[1], [2, 3], [4]], top_k=2))
    assert first.token_ids == [5, 6]
    assert [r for r in first.runs if r.choice != PROMPT] == [ScoredRun(1, [1], 0), ScoredRun(1, [4], 2)]
    assert second.token_ids == [5, 6, 2]
    assert second.runs == (ScoredRun(1, [2, 3], 1),)
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
