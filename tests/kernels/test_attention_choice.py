"""Which kernel of attention runs which batch, with a library of the tests' own in the place of FlashAttention 4."""

import builtins
from itertools import accumulate, pairwise

import pytest
import torch

import moelora_kernels.attention as choosing
from moelora.errors import ConfigError
from moelora.models.context import Segments
from moelora_kernels.attention import LengthTime, PackedAttention, least_bucket, least_length
from moelora_kernels.ops import attention
from moelora_kernels.ops.attention import flash4
from moelora_kernels.ops.attention.naive import naive_attention

LENGTHS = (8, 16, 32)


class Library:
    """`flash_attn_varlen_func` by the naive function; rows behind the last boundary hold NaN."""

    def __init__(self, fault=None):
        self.calls = []
        self._fault = fault

    def __call__(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        window_size=(None, None), learnable_sink=None, softcap=0.0,
    ):  # fmt: skip
        assert causal
        assert cu_seqlens_q is cu_seqlens_k
        ends = cu_seqlens_q.tolist()
        assert max(b - a for a, b in pairwise(ends)) <= max_seqlen_q == max_seqlen_k
        if self._fault == "raises":
            raise RuntimeError("no kernel\nfor this card")
        if self._fault == "reads on" and len(ends) > 2:
            k = k.clone()
            k[ends[0]] += 0 * k[ends[2] - 1]
        if self._fault == "leaks":
            ends = [0, ends[-1]]
        self.calls.append((q.shape[0], len(ends) - 1, max_seqlen_q))
        left, right = window_size
        assert right in (0, None)
        out = naive_attention(
            q, k, v, ends, scale=softmax_scale, window=None if left is None else left + 1, sinks_H=learnable_sink,
            softcap=softcap or None,
        ).to(q.dtype)  # fmt: skip
        out[ends[-1] :] = float("nan")
        return out, None


@pytest.fixture
def plug(monkeypatch):
    """Puts a library in the place of FlashAttention 4, and makes what is measured small."""

    def plug(library):
        choosing.disagreement.cache_clear()
        monkeypatch.setattr(flash4, "_loaded", lambda: (library, None))
        for module in (choosing, attention):
            monkeypatch.setattr(module, "flash4_refusal", lambda *given: None)
        return library

    monkeypatch.setattr(choosing, "LENGTHS", LENGTHS)
    monkeypatch.setattr(choosing, "TOKENS", 32)
    monkeypatch.setattr(choosing, "_CHECKED", (9, 1, 20))
    return plug


def timers(eager, graph=()):
    """Timers that do the work and then give these (triton, fa4) milliseconds, length by length."""

    def timer(pairs):
        left = [ms for pair in pairs for ms in pair]

        def time(work):
            work()
            return left.pop(0)

        return time

    return timer(eager), timer(graph)


def batch(lengths, *, slots=None, bucket=None, window=None, sinks=False, softcap=None, seed=0):
    """Arguments of `PackedAttention.run`: exact, or for a full graph of `bucket` rows and `slots` request slots."""
    generator = torch.Generator().manual_seed(seed)
    rows = bucket or sum(lengths)
    q, k, v = (torch.randn(rows, n, 16, generator=generator).half() for n in (4, 2, 2))
    ends = [0, *accumulate(lengths)] + [sum(lengths)] * ((slots or len(lengths)) - len(lengths))
    segments = Segments(
        cu_seqlens_S1=torch.tensor(ends, dtype=torch.int32),
        lengths=tuple(lengths) if bucket is None else None,
        longest=max(lengths) if bucket is None else bucket,
    )
    options = {
        "scale": 0.25,
        "window": window,
        "sinks": torch.linspace(-1, 1, 4).half() if sinks else None,
        "softcap": softcap,
    }
    return (q, k, v, segments), options


def check(attend, lengths, **given):
    """Runs a batch and compares it with the naive function."""
    (q, k, v, segments), options = batch(lengths, **given)
    out = attend.run(q, k, v, segments, **options)
    expected = naive_attention(
        q, k, v, segments.cu_seqlens_S1.tolist(), scale=0.25, window=options["window"], sinks_H=options["sinks"],
        softcap=options["softcap"],
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-3)


def settled(
    plug, library, timed, *, kernel="auto", full_slots=None, longest=1000, batch_invariant=False, said=None, **of
):
    """An attention that has run one batch, and then chosen."""
    library = plug(library)
    attend = PackedAttention(timers=timers(*timed))
    check(attend, [3, 5], **of)
    assert library is None or not library.calls, "nothing is chosen before it is measured"
    said = [] if said is None else said
    attend.settle(kernel, batch_invariant=batch_invariant, longest=longest, full_slots=full_slots, say=said.append)
    if library is not None:
        library.calls.clear()
    return attend


def times(*pairs):
    return [LengthTime(length=n, triton_ms=a, fa4_ms=b) for n, (a, b) in zip((128, 512, 2048), pairs)]


@pytest.mark.parametrize(
    ("pairs", "length", "bucket"),
    [
        (((1, 2), (1, 0.9), (1, 0.5)), 512, None),
        (((1, 2), (1, 0.9), (9, 5)), 512, 2048),
        (((1, 0.5), (1, 0.5), (1, 0.5)), 128, 128),
        (((1, 0.5), (1, 2), (1, 0.5)), 2048, None),
        (((1, 0.5), (1, 0.5), (1, 0.99)), None, 128),
        (((1, 0.1), (1, 1.5), (1, 1.1)), None, 128),
        ((), None, None),
    ],
)
def test_from_where_on_the_other_kernel_runs(pairs, length, bucket):
    assert least_length(times(*pairs)) == length
    assert least_bucket(times(*pairs)) == bucket


@pytest.mark.parametrize(
    "of", [{}, {"window": 5}, {"sinks": True}, {"softcap": 3.0}, {"window": 1, "sinks": True, "softcap": 2.0}]
)
def test_the_kernel_follows_from_the_longest_request(plug, of):
    library = Library()
    attend = settled(plug, library, ([(1, 2), (1, 0.5), (1, 0.4)],), **of)
    for lengths, expected in (([15, 15], 0), ([3, 16], 1), ([16], 1), ([40, 2], 1), ([1], 0)):
        library.calls.clear()
        check(attend, lengths, **of)
        assert len(library.calls) == expected, lengths
    check(attend, [20, 1], slots=4, bucket=64, **of)
    assert not library.calls, "no graph was to be captured, so none was timed"


def test_the_kernel_of_a_full_graph_follows_from_its_bucket(plug):
    library = Library()
    attend = settled(plug, library, ([(1, 2)] * 3, [(1, 1.5), (1, 0.4), (1, 0.4)]), full_slots=4)
    assert list(attend.choices.values()) == [{"requests": None, "buckets": 16}]
    for lengths, bucket, expected in (([3, 4], 8, 0), ([3, 4], 16, 1), ([40], 64, 1), ([1, 1, 1, 1], 16, 1)):
        library.calls.clear()
        check(attend, lengths, slots=4, bucket=bucket)  # rows behind the last request are zero, not NaN
        assert len(library.calls) == expected, (lengths, bucket)
    check(attend, [40])
    assert len(library.calls) == 1


def test_very_many_requests_run_our_kernel(plug, monkeypatch):
    monkeypatch.setattr(choosing, "MOST_SEQUENCES", 5)
    library = Library()
    attend = settled(plug, library, ([(1, 0.5)] * 3,))
    check(attend, [1] * 4 + [9])
    assert len(library.calls) == 1
    check(attend, [1] * 5 + [9])
    assert len(library.calls) == 1


def test_engines_of_one_process_share_what_was_measured(plug):
    library = Library()
    shared = timers([(1, 2), (1, 0.5), (1, 0.5)])
    plug(library)
    for _ in range(2):
        attend = PackedAttention(timers=shared)
        check(attend, [3])
        library.calls.clear()
        attend.settle("auto", batch_invariant=False, longest=1000, full_slots=None, say=print)
        assert list(attend.choices.values()) == [{"requests": 16, "buckets": None}]
    assert not library.calls, "measured again"


def test_a_full_graph_of_one_request(plug):
    attend = settled(plug, Library(), ([(1, 0.5)] * 3, [(1, 0.5)] * 3), full_slots=1)
    assert list(attend.choices.values()) == [{"requests": 8, "buckets": 8}]


def test_lengths_that_no_request_has_are_not_timed(plug):
    attend = settled(plug, Library(), ([(1, 0.5)] * 3,), longest=20)
    (entry,) = attend.report()
    assert [(one["length"], one["graph"]) for one in entry["times"]] == [(8, False), (16, False)]
    short = settled(plug, Library(), ([],), longest=7)
    assert short.report()[0]["fa4_unused_because"] == "requests have at most 7 tokens"
    slower = settled(plug, Library(), ([(1, 1)] * 3,))
    assert slower.report()[0]["fa4_unused_because"] == "it was not faster"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("leaks", "differs from our kernel by"),
        ("reads on", "changes those beside it"),
        ("raises", "fails: RuntimeError: no kernel for this"),
    ],
)
def test_a_library_that_is_wrong_is_not_used_and_named(plug, fault, reason):
    said = []
    attend = settled(plug, Library(fault), ([],), said=said)
    (entry,) = attend.report()
    assert reason in entry["fa4_unused_because"]
    assert reason in said[-1]
    assert entry["attention"] == "4/2 heads of 16, float16"
    check(attend, [40, 2])
    with pytest.raises(ConfigError, match="cannot be used for 4/2 heads of 16"):
        settled(plug, Library(fault), ([],), kernel="fa4")


def test_batch_invariant_runs_and_those_that_ask_for_ours_do_not_use_it(plug):
    for given, reason in (({"kernel": "triton"}, "asked for"), ({"batch_invariant": True}, "in any batch")):
        library = Library()
        attend = settled(plug, library, ([],), **given)
        check(attend, [40])
        assert not library.calls
        assert reason in attend.report()[0]["fa4_unused_because"]
    with pytest.raises(ConfigError, match="not batch-invariant"):
        settled(plug, Library(), ([],), kernel="fa4", batch_invariant=True)


def test_it_can_be_asked_for_without_being_timed(plug):
    library = Library()
    attend = settled(plug, library, ([],), kernel="fa4")
    check(attend, [1, 3])
    check(attend, [2], slots=3, bucket=8)
    assert len(library.calls) == 2


def test_the_choice_of_another_process_is_taken_over(plug, monkeypatch):
    fast, slow = (settled(plug, Library(), (timed,)) for timed in ([(1, 0.5)] * 3, [(1, 2)] * 3))
    assert fast.choices == {"4/2 heads of 16, float16": {"requests": 8, "buckets": None}}
    slow.choices = fast.choices
    assert slow.choices == fast.choices
    library = plug(Library())
    check(slow, [8])
    assert len(library.calls) == 1
    without = settled(plug, Library(), ([],), kernel="triton")
    without.choices = {"4/2 heads of 16, float16": {"requests": None, "buckets": None}}
    with pytest.raises(ConfigError, match=r"which cannot be used here: another kernel was asked for"):
        without.choices = fast.choices


def test_why_the_library_is_not_there(monkeypatch):
    device = torch.device("cpu")
    assert "needs CUDA" in flash4.flash4_refusal(device, torch.float16, 64, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    device = torch.device("cuda")
    found = flash4._loaded
    monkeypatch.setattr(flash4, "_loaded", lambda: (print, None))
    assert "takes bfloat16" in flash4.flash4_refusal(device, torch.float32, 64, 64)
    assert "divide by 8, got 64 and 20" in flash4.flash4_refusal(device, torch.float16, 64, 20)
    assert "the device has 8.0" in flash4.flash4_refusal(device, torch.float16, 64, 64)
    monkeypatch.setattr(flash4, "_loaded", found)
    imported = builtins.__import__
    for error, reason in (
        (ModuleNotFoundError("no", name="flash_attn.cute"), "is not installed"),
        (ModuleNotFoundError("no", name="cutlass"), "it needs cutlass"),
        (OSError("libcuda.so.1 is missing"), "OSError: libcuda.so.1 is missing"),
    ):

        def failing(name, *given, error=error, **more):
            if name.startswith("flash_attn"):
                raise error
            return imported(name, *given, **more)

        flash4._loaded.cache_clear()
        monkeypatch.setattr(builtins, "__import__", failing)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        try:
            assert reason in flash4.flash4_refusal(device, torch.float16, 64, 64)
        finally:
            monkeypatch.setattr(builtins, "__import__", imported)
            flash4._loaded.cache_clear()
