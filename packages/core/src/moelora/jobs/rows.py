"""The input row: one JSON object per line, checked against the schema. Knows nothing of tokenizers, models or files.

A bad row never raises: it becomes a `Row` whose `error` says what is wrong, so that the others go on.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

from moelora.errors import RequestError
from moelora.jobs.claims import IdClaims

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
ROW_KEYS = ("id", "custom_id", *PROMPT_KEYS, "adapter", "choices", "choices_token_ids", "metadata")
_KNOWN_KEYS = frozenset(ROW_KEYS)
_OTHER_NAMES = {
    "text": "prompt",
    "input": "prompt",
    "token_ids": "prompt_token_ids",
    "input_ids": "prompt_token_ids",
    "lora": "adapter",
    "lora_name": "adapter",
}
"""What other programs, and the output of a run, call a key of a row."""
_CLOSE = 0.65
"""How alike a key must be to be suggested: `meta` is to metadata, `num_tokens` of an output is to no key of a row."""
MAX_DEPTH = 100
"""Levels of nesting in metadata and messages; far below what JSON writers and readers can recurse into."""


@dataclass(slots=True, kw_only=True)  # not frozen: that would double the time to make one, and there are millions
class Row:
    """One line of the input. Once read, nobody changes it.

    line: its number in the file, from 1, blank lines counted. id: as given, else the line number.
    Exactly one of `prompt`, `prompt_token_ids`, `messages` is set unless `error` is.
    adapters: the names as given (may hold "*" and "__base__"), or None to take the run's default.
    At most one of `choices` and `choices_token_ids` is not empty. metadata: any JSON, echoed.
    error: None, or why the row cannot be scored.
    size: what the row takes of its reader's `total`, blank lines before it included; 0 if there is no such reader.
    """

    line: int
    id: str | int
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    adapters: tuple[str, ...] | None = None
    choices: tuple[str, ...] = ()
    choices_token_ids: tuple[tuple[int, ...], ...] = ()
    metadata: Any = None
    error: str | None = None
    size: int = 0

    @property
    def has_choices(self) -> bool:
        """True if the row asks for the scores of choices."""
        return bool(self.choices or self.choices_token_ids)


class Reader(Protocol):
    """What numbered lines come from: `LineReader` and `ParquetReader`."""

    position: int
    """How much of the input was read with the line that was given last."""

    def __iter__(self) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
        """The lines, each read when it is asked for."""
        ...


def read_rows(reader: Reader) -> Iterator[Row]:
    """The rows of an input, as `parse_rows` makes them, with their `size`."""
    before = 0
    for row in parse_rows(reader):
        row.size = reader.position - before
        before = reader.position
        yield row


def parse_rows(lines: Iterable[tuple[int, bytes | dict[str, Any]]]) -> Iterator[Row]:
    """Turns numbered lines, or objects of JSON types alone, into rows, one for each.

    Ids are compared as text, so 7 and "7" are the same. The first row that carries an id keeps it, even if that row is
    bad for another reason; later ones are errors. A row without an id claims its line number if it is good.
    """
    claims = IdClaims()
    for number, data in lines:
        row, explicit = _parse(number, data)
        if explicit or row.error is None:
            first = claims.claim(str(row.id), number)
            if first != number and row.error is None:
                what = f"duplicate id {row.id!r}" if explicit else f"the line number {row.id} stands for the missing id"
                error = f"line {number}: {what}, and line {first} has that id already (7 and '7' count as the same)"
                row = Row(line=number, id=row.id, metadata=row.metadata, error=error)
        yield row


def parse_row(number: int, data: bytes) -> Row:
    """Turns one line into a row. `number` counts from 1; `data` is the line without its end, in UTF-8."""
    return _parse(number, data)[0]


def _parse(number: int, data: bytes | dict[str, Any]) -> tuple[Row, bool]:
    """The row, and whether its id was given by the row itself."""
    identity: str | int = number
    explicit = False
    metadata: Any = None
    try:
        record = load_object(data) if isinstance(data, bytes) else data
        # Id and metadata come first, so that they are echoed even if the rest is wrong.
        given = _id(record)
        explicit = given is not None
        identity = number if given is None else given
        given = record.get("metadata")
        if given is not None:
            _refuse_surrogates(given, "metadata")
            metadata = given
        return Row(line=number, id=identity, metadata=metadata, **_fields(record)), explicit
    except RequestError as error:
        return Row(line=number, id=identity, metadata=metadata, error=f"line {number}: {error}"), explicit


def load_object(data: bytes) -> dict[str, Any]:
    """One line as a JSON object, by the strict rules of RFC 8259. Raises `RequestError` saying what is wrong."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start + 1} of the line") from None
    # A mark at the start of a line can only come from files that were joined; JSON has no use for it there.
    text = text.removeprefix("\ufeff")
    try:
        record = _DECODER.decode(text)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise RequestError(f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except RecursionError:
        raise RequestError("not readable: the JSON is nested too deeply") from None
    except ValueError:  # the only one that is left
        most = sys.get_int_max_str_digits()
        raise RequestError(f"not readable: an integer has more than {most:,} digits") from None
    if not isinstance(record, dict):
        raise RequestError(f"a row must be a JSON object, got {describe(record)}")
    return record


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RequestError(f"key {_short(twice)} stands twice in one object")
    return record


def _refuse_constant(name: str) -> Any:
    raise RequestError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the number {text[:40]} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float)


def json_or_text(text: str) -> Any:
    """The value that `text` is the JSON of, by the same strict rules; `text` itself if it is no JSON."""
    try:
        return _DECODER.decode(text)
    except (RequestError, ValueError, RecursionError):
        return text


def _id(record: dict[str, Any]) -> str | int | None:
    key, value = "id", record.get("id")
    custom = record.get("custom_id")
    if custom is not None:
        if value is not None:
            raise RequestError("give id or custom_id, not both")
        key, value = "custom_id", custom
    if value is None:
        return None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise RequestError(f"{key} must be a string or an integer, got {describe(value)}")
    _refuse_surrogates(value, key)
    return value


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    """The checked fields of a row besides id and metadata; null counts as absent, except for `adapter`."""
    if not record.keys() <= _KNOWN_KEYS:
        key = next(key for key in record if key not in _KNOWN_KEYS)
        meant = nearest_key(key)
        hint = f" Did you mean {meant!r}?" if meant else ""
        raise RequestError(f"unknown key {_short(key)}.{hint} Valid: {', '.join(ROW_KEYS)}")
    prompts = [key for key in PROMPT_KEYS if record.get(key) is not None]
    if len(prompts) != 1:
        found = "none of them" if not prompts else " and ".join(prompts)
        raise RequestError(f"a row needs exactly one of {', '.join(PROMPT_KEYS)}; this one has {found}")
    if record.get("choices") is not None and record.get("choices_token_ids") is not None:
        raise RequestError("give choices or choices_token_ids, not both")
    fields: dict[str, Any] = {}
    if record.get("choices") is not None:
        fields["choices"] = _choices(record["choices"])
    if record.get("choices_token_ids") is not None:
        fields["choices_token_ids"] = _choices_token_ids(record["choices_token_ids"])
    if "adapter" in record:
        fields["adapters"] = _adapters(record["adapter"])
    key = prompts[0]
    may_be_empty = "choices" in fields or "choices_token_ids" in fields
    if key == "messages":
        fields[key] = _messages(record[key])
    else:
        fields[key] = _text(record[key], key) if key == "prompt" else _token_ids(record[key], key)
        if not fields[key] and not may_be_empty:
            raise RequestError(f"{key} is empty")
    return fields


def nearest_key(key: str) -> str | None:
    """The key of a row that was meant by `key`, which is none; None if it resembles none."""
    close = get_close_matches(key, ROW_KEYS, n=1, cutoff=_CLOSE)
    return _OTHER_NAMES.get(key) or (close[0] if close else None)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string, got {describe(value)}")
    _refuse_surrogates(value, where)
    return value


def _list(value: Any, where: str, of: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a list of {of}, got {describe(value)}")
    return value


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    if not set(map(type, _list(value, where, "integers"))) <= {int}:
        index, item = next((i, item) for i, item in enumerate(value) if type(item) is not int)
        raise RequestError(f"{where}[{index}] must be an integer, got {describe(item)}")
    return tuple(value)


def _choices(value: Any) -> tuple[str, ...]:
    if not _list(value, "choices", "strings"):
        raise RequestError("choices is empty; leave it out to score the prompt alone")
    texts = tuple(_text(item, f"choices[{index}]") for index, item in enumerate(value))
    if "" in texts:
        raise RequestError(f"choices[{texts.index('')}] is empty; a choice needs at least one token")
    return texts


def _choices_token_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    if not _list(value, "choices_token_ids", "lists of integers"):
        raise RequestError("choices_token_ids is empty; leave it out to score the prompt alone")
    choices = tuple(_token_ids(item, f"choices_token_ids[{index}]") for index, item in enumerate(value))
    if () in choices:
        raise RequestError(f"choices_token_ids[{choices.index(())}] is empty; a choice needs at least one token")
    return choices


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not _list(value, "messages", "objects"):
        raise RequestError("messages is empty")
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object with role and content, got {describe(message)}")
        if "role" not in message:
            raise RequestError(f"{where} must be an object with role and content, and has no role")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where}.role must be a string, got {describe(message.get('role'))}")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise RequestError(f"{where}.content must be a string or a list, got {describe(message.get('content'))}")
        _refuse_surrogates(message, where)
    return tuple(value)


def _adapters(value: Any) -> tuple[str, ...]:
    """A missing adapter takes the default; null or an empty name is refused, since it is a slip more often than not."""
    names = value if isinstance(value, list) else [value]
    if not names:
        raise RequestError("adapter is an empty list; leave it out for the default")
    for name in names:
        if not isinstance(name, str) or not name:
            raise RequestError(f"adapter must be a name, '*', '__base__' or a list of these, got {describe(name)}")
        _refuse_surrogates(name, "adapter")
        if names.count(name) > 1:
            raise RequestError(f"adapter {_short(name)} is named twice")
    return tuple(names)


def _refuse_surrogates(value: Any, where: str, depth: int = 0) -> None:
    """Half of a surrogate pair has no UTF-8 form: no tokenizer takes it and strict JSON readers refuse it.

    depth: of the lists and objects around the value.
    """
    if depth == MAX_DEPTH and isinstance(value, list | dict):
        raise RequestError(f"the JSON is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(value[error.start])
            raise RequestError(f"{where} holds half a surrogate pair (U+{code:04X}) at {error.start}") from None
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_surrogates(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key, f"a key of {where}")
            _refuse_surrogates(item, f"{where}.{key}", depth + 1)


def _short(text: str) -> str:
    """A string in quotes for a message, however long it is."""
    return repr(text if len(text) <= 60 else text[:59] + "…")


def describe(value: Any) -> str:
    """How a JSON value is called in messages: its kind, and its text if short."""
    kinds = {type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    if value is None:
        return "null"
    shown = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**20 else "of many digits"
    return f"{kinds[type(value)]} {shown if len(shown) <= 40 else shown[:37] + '…'}"
