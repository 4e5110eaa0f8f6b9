"""The job: which requests rows become, the order and content of output rows, and its warnings."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.job_runs import NO_TEXT, Lines, ids, run
from core.tiny_tokenizers import byte_level
from fake_engine import MAX_POSITIONS, VOCAB_SIZE, FakeEngine, logprob, path_logprobs
from moelora.errors import ConfigError
from moelora.jobs.dry import DryScorer
from moelora.jobs.rows import parse_rows
from moelora.jobs.run import JobOptions, PrefillJob
from moelora.jobs.text import TextEncoder
from moelora.types import BASE_ADAPTER


def adapters_of(out: list[dict[str, Any]]) -> list[str | None]:
    return [row["adapter"] for row in out]


# Output rows.


def test_the_fields_of_a_row_with_everything():
    record = ids(1, 2, 3, id="a", adapter="A", choices_token_ids=[[4], [5, 6]], metadata={"k": "ü"})
    out, stats = run([record], names=("A",), logprobs="tokens", top_k=2)
    scores = path_logprobs("A", 1, [2, 3])
    first = out[0]
    assert list(first) == [
        "id",
        "adapter",
        "num_tokens",
        "truncated_tokens",
        "logprob_sum",
        "is_greedy",
        "token_ids",
        "token_logprobs",
        "next_token",
        "top_logprobs",
        "choices",
        "mode",
        "metadata",
        "error",
    ]
    assert first["token_ids"] == [1, 2, 3]
    assert first["token_logprobs"] == [None, *scores]
    assert first["logprob_sum"] == pytest.approx(sum(scores))
    assert first["top_logprobs"][0] == first["next_token"]
    assert (first["id"], first["adapter"], first["mode"], first["error"]) == ("a", "A", "eager", None)
    assert first["metadata"] == {"k": "ü"}
    both = sum(path_logprobs("A", 3, [5, 6]))
    assert first["choices"][1] == {
        "token_ids": [5, 6],
        "logprob": pytest.approx(both),
        "logprob_per_token": pytest.approx(both / 2),
        "logprob_per_byte": None,
        "num_tokens": 2,
        "num_bytes": None,
        "is_greedy": False,
    }
    assert (stats.rows, stats.output_rows, stats.error_rows, stats.requests, stats.tokens) == (1, 1, 0, 1, 6)


def test_the_fields_that_were_not_asked_for_are_not_there():
    out, _ = run([ids(1, 2)])
    assert set(out[0]) == {
        "id",
        "adapter",
        "num_tokens",
        "truncated_tokens",
        "logprob_sum",
        "is_greedy",
        "next_token",
        "mode",
        "metadata",
        "error",
    }


def test_choices_of_text_are_normalised_by_tokens_and_by_bytes():
    tokenizer = byte_level()
    encoder = TextEncoder(tokenizer)
    out, _ = run([{"prompt": "Answer: ", "choices": ["Cü", "yes and no"]}], encoder=encoder)
    for choice, text in zip(out[0]["choices"], ("Cü", "yes and no"), strict=True):
        assert choice["text"] == text
        assert choice["num_bytes"] == len(text.encode())
        assert choice["logprob_per_byte"] == pytest.approx(choice["logprob"] / choice["num_bytes"])
        assert choice["logprob_per_token"] == pytest.approx(choice["logprob"] / choice["num_tokens"])


def test_one_token_has_one_null_entry_and_a_next_token():
    out, _ = run([ids(5)], logprobs="tokens", top_k=1)
    assert out[0]["token_logprobs"] == [None]
    assert out[0]["logprob_sum"] == 0.0
    assert out[0]["next_token"] == out[0]["top_logprobs"][0]


def test_scores_that_are_not_finite_are_null_and_named():
    out, stats = run([ids(1, 13, 2), ids(1, 14), ids(1, 2)], logprobs="tokens")
    assert out[0]["error"] == "line 1: not finite: logprob_sum, token_logprobs[1]"
    assert out[0]["token_logprobs"] == [None, None, logprob(BASE_ADAPTER, 13, 2)]
    assert out[1]["logprob_sum"] is None
    assert out[2]["error"] is None
    assert stats.error_rows == 2


# Adapters of a row.


def test_rows_take_their_own_adapter_else_the_default():
    records = [ids(1), ids(1, adapter="B"), ids(1, adapter=["B", "__base__"]), ids(1, adapter="*")]
    out, _ = run(records, names=("A", "B"), default_adapter="A")
    assert adapters_of(out) == ["A", "B", "B", "__base__", "A", "B"]
    assert [row["id"] for row in out] == [1, 2, 3, 3, 4, 4]


def test_the_default_is_all_adapters_or_the_base():
    assert adapters_of(run([ids(1)], names=("A", "B"))[0]) == ["A", "B"]
    assert adapters_of(run([ids(1)])[0]) == ["__base__"]
    assert adapters_of(run([ids(1)], names=("A", "B"), with_base=True)[0]) == ["__base__", "A", "B"]
    assert adapters_of(run([ids(1, adapter=["A", "*"])], names=("A", "B"), with_base=True)[0]) == [
        "A",
        "__base__",
        "B",
    ]


def test_an_unknown_adapter_costs_that_row_and_names_the_valid_ones():
    out, stats = run([ids(1, adapter="A1"), ids(1, adapter=["B", "A"]), ids(1, 2)], names=("A",))
    assert "unknown adapter 'A1'. Did you mean 'A'? Valid: A, __base__" in out[0]["error"]
    assert [row["error"] is None for row in out] == [False, False, True, True]
    assert stats.error_rows == 2


def test_a_star_without_adapters_is_an_error():
    out, _ = run([ids(1, adapter="*")])
    assert "no adapters are given" in out[0]["error"]
    with pytest.raises(ConfigError, match="no adapters are given"):
        run([], default_adapter="*")
    with pytest.raises(ConfigError, match="unknown default adapter 'C'"):
        run([], names=("A",), default_adapter="C")


# Errors of rows.


def test_bad_rows_cost_themselves_only_and_keep_their_place():
    records = [ids(1, 2), {"prompt": ""}, ids(VOCAB_SIZE), ids(-1), ids(2**40), ids(1, 2, id=1), ids(3, 4, id="z")]
    out, stats = run(records, names=("A", "B"))
    assert [(row["id"], row["adapter"]) for row in out] == [
        (1, "A"),
        (1, "B"),
        (2, None),
        (3, "A"),
        (3, "B"),
        (4, "A"),
        (4, "B"),
        (5, "A"),
        (5, "B"),
        (1, None),
        ("z", "A"),
        ("z", "B"),
    ]
    bad = [row for row in out if row["error"]]
    assert len(bad) == stats.error_rows == 8
    assert all(row["logprob_sum"] is None and row["mode"] is None for row in bad)
    assert "line 3: token id 2000 is outside the vocabulary" in bad[1]["error"]
    assert len(stats.first_errors) == 5


def test_text_without_a_tokenizer_is_an_error_of_the_row():
    out, _ = run([{"prompt": "x"}, ids(1)])
    assert "give prompt_token_ids" in out[0]["error"]
    assert out[1]["error"] is None


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_limit_is_the_models_positions_unless_set(extra: int):
    long = ids(*range(20, 20 + MAX_POSITIONS + extra - 2), choices_token_ids=[[1], [2, 3]])
    out, _ = run([long])
    assert (out[0]["error"] is None) == (extra <= 0)
    assert extra <= 0 or f"exceed the limit of {MAX_POSITIONS} (positions of the model)" in out[0]["error"]
    out, stats = run([long], on_long="truncate-left")
    assert out[0]["error"] is None
    assert out[0]["truncated_tokens"] == max(extra, 0) == stats.truncated_tokens
    assert [c["num_tokens"] for c in out[0]["choices"]] == [1, 2]
    assert out[0]["num_tokens"] == MAX_POSITIONS - 2 + min(extra, 0)


def test_a_smaller_limit_counts_choices_and_never_cuts_them():
    out, _ = run([ids(1, 2, 3, choices_token_ids=[[7, 8, 9]])], max_length=3, on_long="truncate-left")
    assert "choices are never cut" in out[0]["error"]
    out, _ = run([ids(1, 2, 3)], max_length=2, on_long="truncate-left", logprobs="tokens")
    assert out[0]["token_ids"] == [2, 3]
    assert run([ids(1, 2, 3)], max_length=1000)[0][0]["error"] is None


# The job as a whole.


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=12), st.integers(1, 9))
def test_output_is_in_input_order_whatever_the_engine_does(kinds: list[tuple[bool, int]], window: int):
    records = [
        ids(i + 20, adapter=["A", "B", "__base__"][:n]) if good else {"prompt": 1} for i, (good, n) in enumerate(kinds)
    ]
    out, stats = run(records, names=("A", "B"), window=window)
    wanted = [
        (i + 1, name) for i, (good, n) in enumerate(kinds) for name in (["A", "B", "__base__"][:n] if good else [None])
    ]
    assert [(row["id"], row["adapter"]) for row in out] == wanted
    assert stats.output_rows == len(wanted)


def test_bad_rows_do_not_pile_up_until_a_good_one_comes():
    sink = Lines()
    seen: list[int] = []

    def rows() -> Any:
        for number in range(1, 101):
            seen.append(len(sink.lines))
            yield number, b"not JSON"

    PrefillJob(FakeEngine(), NO_TEXT).run(parse_rows(rows()), sink)
    assert seen == list(range(100))


def test_rows_are_read_no_further_than_the_engine_asks():
    read = 0

    def rows() -> Any:
        nonlocal read
        for read in range(1, 1001):
            yield read, json.dumps(ids(20)).encode()

    class Watching(Lines):
        most = 0

        def write(self, line: bytes) -> None:
            super().write(line)
            self.most = max(self.most, read - len(self.lines))

    sink = Watching()
    PrefillJob(FakeEngine(window=10), NO_TEXT).run(parse_rows(rows()), sink)
    assert len(sink.lines) == 1000
    assert sink.most <= 10


def test_an_adapter_that_scores_as_the_base_is_told():
    records = [ids(*random.Random(i).choices(range(20, 500), k=5)) for i in range(6)]
    _, stats = run(records, names=("A", "twin"), with_base=True)
    assert len(stats.warnings) == 1
    assert "adapter 'twin' scores exactly as the base in every row scored with both (6 rows)" in stats.warnings[0]
    assert run(records, names=("twin",))[1].warnings == []


def test_one_adapter_name_holds_for_all_rows():
    out, _ = run([ids(i, i + 1) for i in range(20, 30)], names=("A",), default_adapter="A")
    assert [row["logprob_sum"] for row in out] == [logprob("A", i, i + 1) for i in range(20, 30)]


def test_a_failure_of_the_engine_ends_the_job():
    with pytest.raises(RuntimeError, match="token 15"):
        run([ids(1), ids(15)])


def test_top_k_beyond_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="only 2000 tokens"):
        run([], top_k=VOCAB_SIZE + 1)


def test_a_dry_run_shows_ids_and_errors():
    tokenizer = byte_level(bos="<s>", adds_bos=True)
    records = [{"prompt": "<s>Answer:", "choices": [" C"]}, {"prompt": 1}, ids(VOCAB_SIZE)]
    out, stats = run(records, encoder=TextEncoder(tokenizer), dry=True)
    assert tokenizer.decode(out[0]["token_ids"]) == "<s>Answer:"
    assert out[0]["choices"] == [{"text": " C", "token_ids": tokenizer(" C", add_special_tokens=False)["input_ids"]}]
    assert [row["error"] is None for row in out] == [True, False, False]
    assert stats.error_rows == 2


def test_a_dry_run_refuses_what_a_run_refuses():
    records = [ids(1, adapter=["A", "B"]), ids(VOCAB_SIZE), ids(-1), ids(1, choices_token_ids=[[2], [VOCAB_SIZE + 5]])]
    records += [ids(*range(MAX_POSITIONS + 1)), ids(1, 2)]
    scorer = DryScorer(vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, adapter_names=["A"])
    sink = Lines()
    rows = parse_rows((i, json.dumps(r).encode()) for i, r in enumerate(records, 1))
    PrefillJob(scorer, NO_TEXT, JobOptions()).dry_run(rows, sink)
    errors = [json.loads(line)["error"] for line in sink.lines]
    assert errors == [row["error"] for row in run(records, names=("A",))[0]]
    assert [error is None for error in errors] == [True, False, False, False, False, False, True]
    assert errors[1] == "line 1: unknown adapter 'B'. Valid: A, __base__"


# Progress.


def test_progress_is_told_once_a_batch_when_all_of_it_counts():
    """The next result is a batch away: what is shown until then must hold all that is done."""
    seen = []
    job = PrefillJob(FakeEngine(window=5), NO_TEXT, on_progress=lambda stats, earlier: seen.append(stats.output_rows))
    job.run(parse_rows((i, json.dumps(ids(i)).encode()) for i in range(20, 32)), Lines())
    assert seen == [5, 10, 12, 12]
