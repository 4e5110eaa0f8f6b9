"""The row schema: what is accepted, what becomes an error of its row, and that nothing ever raises."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelora.jobs.rows import ROW_KEYS, Row, parse_row, parse_rows


def parse(record: Any) -> Row:
    return parse_row(7, json.dumps(record).encode())


def rows_of(*records: Any) -> list[Row]:
    return list(parse_rows((i, json.dumps(r).encode()) for i, r in enumerate(records, 1)))


def test_a_full_row_keeps_every_field():
    row = parse(
        {
            "id": "a",
            "prompt": "Hello",
            "adapter": ["A", "__base__"],
            "choices": [" yes", " no"],
            "metadata": {"k": [1, None, "ü"]},
        }
    )
    assert row == Row(
        line=7,
        id="a",
        prompt="Hello",
        adapters=("A", "__base__"),
        choices=(" yes", " no"),
        metadata={"k": [1, None, "ü"]},
    )


def test_the_line_number_stands_for_a_missing_id_and_custom_id_is_an_alias():
    assert parse({"prompt": "x"}).id == 7
    assert parse({"prompt": "x", "custom_id": "c"}).id == "c"
    assert parse({"prompt": "x", "id": 0}).id == 0


def test_null_counts_as_absent_for_all_but_the_adapter():
    row = parse({"id": None, "prompt": None, "prompt_token_ids": [1], "messages": None, "choices": None})
    assert row.error is None
    assert row.prompt_token_ids == (1,)
    assert "adapter must be a name" in (parse({"prompt": "x", "adapter": None}).error or "")


BAD = [
    ({}, "exactly one of prompt, prompt_token_ids, messages; this one has none"),
    ({"prompt": "x", "prompt_token_ids": [1]}, "has prompt and prompt_token_ids"),
    ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "has prompt and messages"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": 5}, "prompt must be a string, got an integer 5"),
    ({"prompt": ["x"]}, "prompt must be a string, got a list"),
    ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
    ({"prompt_token_ids": "1 2"}, 'must be a list of integers, got a string "1 2"'),
    ({"prompt_token_ids": [1, True]}, "prompt_token_ids[1] must be an integer, got a boolean true"),
    ({"prompt_token_ids": [1, 2.0]}, "prompt_token_ids[1] must be an integer, got a number 2.0"),
    ({"prompt_token_ids": [[1]]}, "prompt_token_ids[0] must be an integer, got a list"),
    ({"prompt_token_ids": [None]}, "got null"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": ["hi"]}, "messages[0] must be an object"),
    ({"messages": [{"content": "x"}]}, "messages[0] must be an object with role and content, and has no role"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role must be a string, got null"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"prompt": "x", "adapter": ""}, "adapter must be a name"),
    ({"prompt": "x", "adapter": []}, "adapter is an empty list"),
    ({"prompt": "x", "adapter": ["A", 1]}, "got an integer 1"),
    ({"prompt": "x", "adapter": ["A", "A"]}, "adapter 'A' is named twice"),
    ({"prompt": "x", "choices": []}, "choices is empty"),
    ({"prompt": "x", "choices": ["", " yes"]}, "choices[0] is empty"),
    ({"prompt": "x", "choices": " yes"}, "choices must be a list of strings"),
    ({"prompt": "x", "choices": [1]}, "choices[0] must be a string"),
    ({"prompt": "x", "choices_token_ids": [[1], []]}, "choices_token_ids[1] is empty"),
    ({"prompt": "x", "choices_token_ids": [1]}, "choices_token_ids[0] must be a list of integers"),
    ({"prompt": "x", "choices": ["a"], "choices_token_ids": [[1]]}, "not both"),
    ({"prompt": "x", "id": 1.5}, "id must be a string or an integer, got a number 1.5"),
    ({"prompt": "x", "id": True}, "id must be a string or an integer"),
    ({"prompt": "x", "id": 1, "custom_id": 1}, "id or custom_id, not both"),
    ({"promt": "x"}, "unknown key 'promt'. Did you mean 'prompt'?"),
    ({"prompt": "x", "adaptor": "A"}, "Did you mean 'adapter'?"),
    ({"id": 1, "token_ids": [1]}, "Did you mean 'prompt_token_ids'?"),
    ({"input_ids": [1]}, "Did you mean 'prompt_token_ids'?"),
    ({"text": "x"}, "Did you mean 'prompt'?"),
    ({"prompt": "x", "lora_name": "A"}, "Did you mean 'adapter'?"),
    ({"id": 1, "num_tokens": 3}, "unknown key 'num_tokens'. Valid: id"),
    ({"prompt": "x", "lora_scale": 2}, "unknown key 'lora_scale'. Valid: id, custom_id"),
    ([1, 2], "a row must be a JSON object, got a list"),
    (None, "a row must be a JSON object, got null"),
    ("x", "a row must be a JSON object, got a string"),
    (3, "a row must be a JSON object, got an integer"),
]


@pytest.mark.parametrize(("record", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_a_bad_row_says_what_is_wrong_and_where(record: Any, message: str):
    row = parse(record)
    assert row.error is not None
    assert row.error.startswith("line 7: ")
    assert message in row.error
    assert row.prompt is None


BAD_BYTES = [
    (b"{", "not valid JSON"),
    (b'{"prompt": "x"} {"prompt": "y"}', "not valid JSON: Extra data at column 17"),
    (b'{"prompt": "x", "metadata": NaN}', "NaN is not JSON"),
    (b'{"prompt": "x", "metadata": [-Infinity]}', "-Infinity is not JSON"),
    (b'{"prompt": "x", "metadata": 1e999}', "1e999 is too large"),
    (b'{"prompt": "x", "prompt": "y"}', "key 'prompt' stands twice"),
    (b'{"prompt": "x", "metadata": {"a": 1, "a": 2}}', "key 'a' stands twice"),
    (b'{"prompt": "caf\xe9"}', "not UTF-8: byte 0xe9 at byte 16"),
    (b'{"prompt": "a\\ud83d"}', "prompt holds half a surrogate pair (U+D83D) at 1"),
    (b'{"prompt": "x", "choices": ["a", "\\udc00"]}', "choices[1] holds half a surrogate pair"),
    (b'{"messages": [{"role": "user", "content": [{"text": "\\ud800"}]}]}', "messages[0].content[0].text holds half"),
    (b'{"prompt": "x", "metadata": {"k": "\\ud800"}}', "metadata.k holds half a surrogate pair"),
    (b'{"prompt": "x", "id": "\\ud800"}', "id holds half a surrogate pair"),
    (b'{"prompt": "x", "adapter": "\\ud800"}', "adapter holds half a surrogate pair"),
    (b'{"prompt": "x", "\\ud800": 1}', "unknown key"),
    (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "not readable: an integer has more than 4,300 digits"),
    (b'{"metadata": ' + b"[" * 200 + b"]" * 200 + b', "prompt": "x"}', "nested more than 100 levels"),
    (b'{"metadata": ' + b"[" * 101 + b"]" * 101 + b', "prompt": "x"}', "nested more than 100 levels"),
    (b'{"metadata": ' + b'{"a":' * 101 + b"1" + b"}" * 101 + b', "prompt": "x"}', "nested more than 100 levels"),
    (b"[" * 200_000, "not "),
    (b'{"prompt": "a\tb"}', "not valid JSON: Invalid control character"),
]


@pytest.mark.parametrize(("data", "message"), BAD_BYTES, ids=[m[:40] for _, m in BAD_BYTES])
def test_lines_that_python_would_take_or_choke_on_are_row_errors(data: bytes, message: str):
    row = parse_row(3, data)
    assert row.error is not None
    assert row.error.startswith("line 3: ")
    assert message in row.error
    row.error.encode()  # an error can be written whatever it quotes
    assert json.dumps(row.metadata, allow_nan=False)


def test_a_hundred_levels_are_not_too_many():
    for deep in (b"[" * 100 + b"]" * 100, b'{"a":' * 100 + b"1" + b"}" * 100):
        row = parse_row(3, b'{"metadata": ' + deep + b', "prompt": "x"}')
        assert (row.error, row.metadata) == (None, json.loads(deep))


def test_a_whole_surrogate_pair_is_one_character():
    assert parse_row(1, b'{"prompt": "a\\ud83d\\ude00"}').prompt == "a😀"


def test_a_byte_order_mark_at_the_start_of_any_line_is_skipped():
    assert parse_row(4, b'\xef\xbb\xbf{"prompt": "x"}').prompt == "x"


def test_an_error_echoes_id_and_metadata():
    row = parse({"id": "r1", "metadata": {"a": 1}, "prompt": 5})
    assert (row.id, row.metadata) == ("r1", {"a": 1})


def test_the_first_of_two_equal_ids_stays_good():
    rows = rows_of(
        {"id": 7, "prompt": "a"}, {"id": "7", "prompt": "b"}, {"id": 7, "prompt": "c"}, {"id": "8", "prompt": "d"}
    )
    assert [r.error is None for r in rows] == [True, False, False, True]
    assert "duplicate id '7', and line 1 has that id already" in (rows[1].error or "")
    assert rows[1].id == "7"


def test_an_id_is_taken_even_if_its_row_is_bad():
    rows = rows_of({"id": 7, "prompt": ""}, {"id": 7, "prompt": "b"})
    assert "prompt is empty" in (rows[0].error or "")
    assert "duplicate id 7" in (rows[1].error or "")


def test_line_numbers_as_ids_meet_given_ids():
    rows = rows_of({"id": 2, "prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}, {"id": "3", "prompt": "d"}, {"promp": 1})
    assert [r.error is None for r in rows] == [True, False, True, False, False]
    assert "the line number 2 stands for the missing id" in (rows[1].error or "")
    assert "line 3 has that id already" in (rows[3].error or "")


def test_a_line_that_cannot_be_read_takes_no_id():
    rows = list(parse_rows([(1, b"{"), (2, b'{"id": 1, "prompt": "x"}')]))
    assert rows[0].error is not None
    assert rows[1].error is None


texts = st.text('aü\ud83d\ude00\u2028"', max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


@given(st.binary(max_size=60))
def test_no_bytes_raise(data: bytes):
    row = parse_row(1, data)
    assert row.error is not None or row.prompt is not None or row.prompt_token_ids is not None or row.messages


@given(st.dictionaries(st.sampled_from(ROW_KEYS), json_values, max_size=5))
def test_no_record_raises_and_good_rows_have_one_prompt(record: dict[str, Any]):
    row = parse(record)
    if row.error is None:
        assert sum(x is not None for x in (row.prompt, row.prompt_token_ids, row.messages)) == 1
        assert not (row.choices and row.choices_token_ids)
    json.dumps(row.metadata, allow_nan=False).encode()
    json.dumps(row.id).encode()
