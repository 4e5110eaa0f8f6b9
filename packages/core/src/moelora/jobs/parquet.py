"""Parquet in and out, some rows at a time: what JSON Lines hold, in columns. Needs pyarrow (`moelora[parquet]`).

Both directions go through the JSON of a row, so that every rule about rows stands in one place.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from moelora.errors import ConfigError, InputError, named
from moelora.jobs.rows import ROW_KEYS, json_or_text, nearest_key

ENDING = ".parquet"
_BATCH_ROWS = 1024
_ROW_SIZE = 1 << 16
"""What a row counts as where it is counted how much of the input is done: its lines are whole parts of it."""
_GROUP_ROWS = 8192
_GROUP_BYTES = 64 << 20
"""Of JSON; a group of rows is written when it has that many of either."""


def require_pyarrow(what: str) -> None:
    """Raises `ConfigError` saying how to install what is missing."""
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{what} is Parquet, which needs pyarrow: python -m pip install 'moelora[parquet]'")


class ParquetReader:
    """Reads one Parquet file, once, from front to back, as `(row number from 1, the row as JSON)`.

    Rows of columns that hold nothing but what JSON has come as objects, without the way through text. Null columns are
    left out, as absent keys are. Text in the column `metadata` is read as JSON if it is that, since `ParquetSink`
    writes it so, and each run after another would quote it once more. Raises `InputError` for what is no Parquet file
    or has no row, for columns that no row may have, and for values that JSON cannot hold, naming the column.

    total: of all rows, each of which counts as `_ROW_SIZE`; position: of those up to the one that was given last.
    """

    def __init__(self, source: str | Path) -> None:
        require_pyarrow(f"input {source}")
        import pyarrow
        from pyarrow import parquet

        self.name = str(source)
        try:
            self._file = parquet.ParquetFile(source)
        except FileNotFoundError:
            raise InputError(f"input {source} does not exist") from None
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(f"input {source} is no readable Parquet file: {_first_line(error)}") from None
        self.total: int | None = self._file.metadata.num_rows * _ROW_SIZE
        self.position = 0
        if self.total == 0:
            raise InputError(f"input {source} has no rows")
        self._check_columns()

    def _check_columns(self) -> None:
        """Before any work: what is wrong with a column is wrong with every row."""
        from pyarrow import types

        schema = self._file.schema_arrow
        unknown = {name: nearest_key(name) for name in schema.names if name not in ROW_KEYS}
        if unknown:
            shown = [f"{name!r} (did you mean {key!r}?)" if key else repr(name) for name, key in unknown.items()]
            valid = ", ".join(ROW_KEYS)
            raise InputError(
                f"input {self.name}: {shown[0]} is no column of rows. Valid: {valid}"
                if len(shown) == 1
                else f"input {self.name}: {', '.join(shown)} are no columns of rows. Valid: {valid}"
            )
        for name in schema.names:
            count = schema.names.count(name)
            if count > 1:
                raise InputError(f"input {self.name}: column {name!r} stands there {count} times")
            value = schema.field(name).type
            if types.is_temporal(value) or types.is_decimal(value) or _is_binary(value):
                raise InputError(f"input {self.name}: column {name!r} is of type {value}, which JSON does not have")

    def __iter__(self) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
        names = self._file.schema_arrow.names
        plain = all(map(_is_plain, self._file.schema_arrow.types))
        number = 0
        for batch in self._file.iter_batches(batch_size=_BATCH_ROWS):
            columns, utf8 = self._columns(batch)
            for values in zip(*columns, strict=True):
                number += 1
                self.position = number * _ROW_SIZE
                row = {name: value for name, value in zip(names, values, strict=True) if value is not None}
                yield number, row if plain and utf8 else self._encode(number, row)

    def _columns(self, batch: Any) -> tuple[list[list[Any]], bool]:
        """The values by column, and whether all text is UTF-8; bytes that are not stay in it, for its row to answer."""
        columns, utf8 = [], True
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                values = _values(column)
            except UnicodeDecodeError as error:
                if not _is_text(column.type):
                    raise InputError(f"input {self.name}: column {name!r} holds text that is not UTF-8") from error
                raw = column.cast("binary").to_pylist()
                values = [None if one is None else one.decode("utf-8", "surrogateescape") for one in raw]
                utf8 = False
            if name == "metadata":
                values = [json_or_text(one) if isinstance(one, str) else one for one in values]
            columns.append(values)
        return columns, utf8

    def _encode(self, number: int, row: dict[str, Any]) -> bytes:
        try:
            return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape")
        except TypeError:
            for name, value in row.items():
                try:
                    json.dumps(value)
                except TypeError as error:
                    raise InputError(f"input {self.name}: column {name!r} of row {number}: {error}") from None
            raise

    def __enter__(self) -> ParquetReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()


class ParquetSink:
    """Output rows as Parquet, beside its final place until its context is left without an error.

    Every column is there whatever was asked for, null where it does not apply; `id` is text, `metadata` is JSON text.
    on_whole: is given the whole file before it is moved to its place.
    """

    def __init__(self, path: str | Path, *, on_whole: Callable[[Path], None] | None = None) -> None:
        require_pyarrow(f"output {path}")
        self._on_whole = on_whole
        self._final = Path(os.path.realpath(path))
        self._lines: list[bytes] = []
        self._bytes = 0

    def __enter__(self) -> ParquetSink:
        from pyarrow import parquet

        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self._final.with_name(f".{self._final.name}.{secrets.token_hex(4)}.tmp")
        self._schema = output_schema()
        try:
            self._writer = parquet.ParquetWriter(self._temporary, self._schema, compression="zstd")
        except BaseException:  # as in AtomicFile
            self._temporary.unlink(missing_ok=True)
            raise
        return self

    def write(self, line: bytes) -> None:
        """Takes one row as its JSON line."""
        self._lines.append(line)
        self._bytes += len(line)
        if len(self._lines) >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            try:
                self._writer.write_table(_table(self._lines, self._schema))
            except OSError as error:
                raise named(error, self._final) from error
            self._lines.clear()
            self._bytes = 0

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
            if kind is None:
                with self._temporary.open("rb") as file:
                    os.fsync(file.fileno())
                if self._on_whole is not None:
                    self._on_whole(self._temporary)
                os.replace(self._temporary, self._final)
        except OSError as error:
            raise named(error, self._final) from error
        finally:
            self._temporary.unlink(missing_ok=True)


def _is_plain(value: Any) -> bool:
    """Whether every value of a type is one of JSON: not so for floats, which may be NaN, and for maps."""
    from pyarrow import types

    if types.is_list(value) or types.is_large_list(value) or types.is_dictionary(value):
        return _is_plain(value.value_type)
    return _is_text(value) or any(test(value) for test in (types.is_boolean, types.is_integer, types.is_null))


def _is_text(value: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(value) or types.is_large_string(value))


def _values(column: Any) -> list[Any]:
    """The values of a column, those of lists of integers cut out of one list: several times as fast."""
    from pyarrow import types

    listed = types.is_list(column.type) and types.is_integer(column.type.value_type)
    if not listed or column.null_count or column.values.null_count:
        return list(column.to_pylist())
    values = column.values.to_pylist()
    return [values[start:end] for start, end in pairwise(column.offsets.to_pylist())]


def _table(lines: list[bytes], schema: Any) -> Any:
    """Lines of JSON as an Arrow table: by Arrow's own reader, unless something has to become text that is none."""
    import pyarrow
    from pyarrow import json as arrow_json

    text = b"".join(lines)
    reading = arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parsing = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    try:
        table = arrow_json.read_json(BytesIO(text), read_options=reading, parse_options=parsing)
    except pyarrow.ArrowInvalid:  # an id that is a number, metadata that are no text
        return _table_by_rows(lines, schema)
    column = table.column("metadata")
    return table if column.null_count == len(column) else _table_by_rows(lines, schema)


def _table_by_rows(lines: list[bytes], schema: Any) -> Any:
    """The same, row by row: ids as text, metadata as JSON."""
    import pyarrow

    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["id"] = None if row["id"] is None else str(row["id"])
        row["metadata"] = None if row["metadata"] is None else json.dumps(row["metadata"], ensure_ascii=False)
    return pyarrow.Table.from_pylist(rows, schema=schema)


def _is_binary(value: Any) -> bool:
    from pyarrow import types

    return bool(types.is_binary(value) or types.is_large_binary(value) or types.is_fixed_size_binary(value))


def output_schema() -> Any:
    """The columns of an output row, as an Arrow schema."""
    import pyarrow as pa

    token = pa.struct([("token_id", pa.int64()), ("logprob", pa.float64())])
    choice = pa.struct(
        [
            ("text", pa.string()),
            ("token_ids", pa.list_(pa.int64())),
            ("logprob", pa.float64()),
            ("logprob_per_token", pa.float64()),
            ("logprob_per_byte", pa.float64()),
            ("num_tokens", pa.int64()),
            ("num_bytes", pa.int64()),
            ("is_greedy", pa.bool_()),
        ]
    )
    return pa.schema(
        [
            ("id", pa.string()),
            ("adapter", pa.string()),
            ("num_tokens", pa.int64()),
            ("truncated_tokens", pa.int64()),
            ("logprob_sum", pa.float64()),
            ("is_greedy", pa.bool_()),
            ("token_ids", pa.list_(pa.int64())),
            ("token_logprobs", pa.list_(pa.float64())),
            ("next_token", token),
            ("top_logprobs", pa.list_(token)),
            ("choices", pa.list_(choice)),
            ("mode", pa.string()),
            ("metadata", pa.string()),
            ("error", pa.string()),
        ]
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
