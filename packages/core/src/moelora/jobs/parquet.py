"""Parquet in and out, some rows at a time: what JSON Lines hold, in columns. Needs pyarrow (`moelora[parquet]`).

Both directions go through the JSON of a row, so that every rule about rows stands in one place.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from moelora.errors import ConfigError, InputError

ENDING = ".parquet"
_BATCH_ROWS = 1024
_GROUP_ROWS = 8192


def require_pyarrow(what: str) -> None:
    """Raises `ConfigError` saying how to install what is missing."""
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{what} is Parquet, which needs pyarrow: python -m pip install 'moelora[parquet]'")


class ParquetReader:
    """Reads one Parquet file, once, from front to back, as `(row number from 1, the row as JSON)`.

    Null columns are left out, as absent keys are. Raises `InputError` for what is no Parquet file or has no row, and
    for values that JSON cannot hold, naming the column.
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
        if self._file.metadata.num_rows == 0:
            raise InputError(f"input {source} has no rows")
        self._check_columns()

    def _check_columns(self) -> None:
        """Before any work: of two columns of one name a row would keep one alone."""
        from pyarrow import types

        schema = self._file.schema_arrow
        for name in schema.names:
            count = schema.names.count(name)
            if count > 1:
                raise InputError(f"input {self.name}: column {name!r} stands there {count} times")
            value = schema.field(name).type
            if types.is_temporal(value) or types.is_decimal(value) or _is_binary(value):
                raise InputError(f"input {self.name}: column {name!r} is of type {value}, which JSON does not have")

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        for batch in self._file.iter_batches(batch_size=_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, self._encode(number, row)

    def _encode(self, number: int, row: dict[str, Any]) -> bytes:
        given = {name: value for name, value in row.items() if value is not None}
        try:
            return json.dumps(given, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except TypeError:
            for name, value in given.items():
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
    """

    def __init__(self, path: str | Path) -> None:
        require_pyarrow(f"output {path}")
        self._final = Path(os.path.realpath(path))
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> ParquetSink:
        from pyarrow import parquet

        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self._final.with_name(f".{self._final.name}.{secrets.token_hex(4)}.tmp")
        self._schema = output_schema()
        self._writer = parquet.ParquetWriter(self._temporary, self._schema, compression="zstd")
        return self

    def write(self, line: bytes) -> None:
        """Takes one row as its JSON line."""
        row = json.loads(line)
        row["id"] = None if row["id"] is None else str(row["id"])
        row["metadata"] = None if row["metadata"] is None else json.dumps(row["metadata"], ensure_ascii=False)
        self._rows.append(row)
        if len(self._rows) >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        if self._rows:
            self._writer.write_table(pyarrow.Table.from_pylist(self._rows, schema=self._schema))
            self._rows.clear()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
            if kind is None:
                with self._temporary.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(self._temporary, self._final)
        finally:
            self._temporary.unlink(missing_ok=True)


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
