"""Jobs as tests run them: rows given as JSON values, an engine without a model, and the lines that come out."""

import json
from typing import Any

from fake_engine import FakeEngine
from moelora.jobs.rows import parse_rows
from moelora.jobs.run import JobOptions, PrefillJob
from moelora.jobs.stats import JobStats
from moelora.jobs.text import TextEncoder

NO_TEXT = TextEncoder(None)


class Lines:
    """A sink that keeps lines."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *args: Any) -> None:
        pass


def run(
    records: list[Any],
    *,
    names: tuple[str, ...] = (),
    encoder: TextEncoder = NO_TEXT,
    window: int = 3,
    dry: bool = False,
    **options: Any,
) -> tuple[list[dict[str, Any]], JobStats]:
    """The output rows of a job over `records`, and what was counted. options: of `JobOptions`."""
    engine = FakeEngine(adapters=dict.fromkeys(names, "x"), window=window)
    job = PrefillJob(engine, encoder, JobOptions(**options))
    sink = Lines()
    rows = parse_rows((i, json.dumps(r).encode()) for i, r in enumerate(records, 1))
    stats = job.dry_run(rows, sink) if dry else job.run(rows, sink)
    return [json.loads(line) for line in sink.lines], stats


def ids(*tokens: int, **fields: Any) -> dict[str, Any]:
    """A row of token ids."""
    return {"prompt_token_ids": list(tokens), **fields}
