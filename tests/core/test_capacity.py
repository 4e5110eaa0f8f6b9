"""Capacity arithmetic and admission, without a device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelora.capacity import (
    TILE_ROWS,
    EagerReason,
    PrefillCapacity,
    admit,
    bucket_for,
    csgmv_chunk_rows,
    default_buckets,
)
from moelora.errors import ConfigError
from moelora.types import GraphMode


def capacity(max_tokens=4096, max_requests=1024, full_max_requests=64, slots=8, max_rank=16):
    return PrefillCapacity(
        max_tokens=max_tokens,
        max_requests=max_requests,
        full_max_requests=full_max_requests,
        slots=slots,
        max_rank=max_rank,
    )


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 100))
def test_dense_tiles_bound_every_way_of_cutting_segments(lengths, slots):
    """However the rows fall into at most S segments, the tiles that cut them never exceed the bound."""
    lengths = lengths[:slots]
    tokens = sum(lengths)
    tiles = sum(-(-n // TILE_ROWS) for n in lengths)
    bound = capacity(max_tokens=tokens, max_requests=slots).dense_tiles(tokens, GraphMode.BREAKABLE)
    assert tiles <= bound <= tokens


def test_dense_tiles_is_reached_by_the_worst_case():
    # 63 segments of one row and one of 17: every segment but the last ends in a partial tile.
    assert capacity(max_requests=64).dense_tiles(80, GraphMode.BREAKABLE) == 63 + 5
    assert 63 + -(-17 // TILE_ROWS) <= 63 + 5


@given(st.integers(0, 20_000), st.integers(0, 300))
def test_csgmv_segments_bound_rows_ordered_by_slot(tokens, slots):
    chunk = csgmv_chunk_rows(tokens)
    # The worst split over L + 1 groups wastes one partial chunk in each.
    worst = tokens // chunk + slots + 1
    assert worst <= capacity(slots=slots).csgmv_segments(tokens)
    assert chunk in (16, 32, 64, 128)


@given(st.integers(1, 40_000))
def test_the_limit_itself_is_a_bucket(max_tokens):
    buckets = default_buckets(max_tokens)
    assert buckets[-1] == max_tokens
    assert list(buckets) == sorted(set(buckets))


@given(st.integers(1, 40_000), st.data())
def test_a_default_bucket_is_never_less_than_half_full(max_tokens, data):
    buckets = default_buckets(max_tokens)
    tokens = data.draw(st.integers(1, max_tokens))
    bucket = bucket_for(tokens, buckets)
    assert bucket is not None
    assert bucket >= tokens
    assert bucket == buckets[0] or 2 * tokens >= bucket


def test_request_slots_follow_the_mode_and_no_constant():
    many = capacity(max_tokens=8192, max_requests=5000, full_max_requests=257)
    assert many.request_slots(GraphMode.FULL) == 257
    assert many.request_slots(GraphMode.BREAKABLE) == 5000
    assert capacity(max_tokens=10, max_requests=5000).request_slots(GraphMode.BREAKABLE) == 10


@pytest.mark.parametrize(
    ("tokens", "requests", "mode", "blocked", "reason"),
    [
        (100, 4, GraphMode.OFF, None, EagerReason.GRAPH_OFF),
        (100, 4, GraphMode.FULL, EagerReason.ARCHITECTURE_NOT_CAPTURABLE, EagerReason.ARCHITECTURE_NOT_CAPTURABLE),
        (4097, 4, GraphMode.FULL, None, EagerReason.TOKENS_OVER_LARGEST_BUCKET),
        (100, 65, GraphMode.FULL, None, EagerReason.REQUESTS_OVER_SLOTS),
        (100, 65, GraphMode.BREAKABLE, None, None),
        (100, 64, GraphMode.FULL, None, None),
        (300, 4, GraphMode.FULL, None, EagerReason.BUCKET_TOO_SPARSE),
        (4096, 4, GraphMode.FULL, None, None),
        (1, 1, GraphMode.FULL, None, None),
    ],
)
def test_admission_gives_each_reason(tokens, requests, mode, blocked, reason):
    buckets = (16, 128, 1024, 4096)
    admission = admit(
        tokens=tokens, requests=requests, mode=mode, buckets=buckets, capacity=capacity(), blocked=blocked
    )
    assert admission.reason is reason
    assert admission.replays == (reason is None)
    if reason is None:
        assert admission.bucket == bucket_for(tokens, buckets)


def test_every_reason_has_a_sentence():
    assert all(reason.text for reason in EagerReason)


@pytest.mark.parametrize("field", ["max_tokens", "max_requests", "full_max_requests", "slots", "max_rank"])
def test_capacities_must_make_sense(field):
    with pytest.raises(ConfigError, match=field):
        capacity(**{field: -1})
