"""Which requests of an input are compared: a few of each adapter, spread over the file, the same ones every time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moelora.errors import InputError
from moelora.types import BASE_ADAPTER, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is compared, one adapter after the other. lines: the line of the input that each request comes from.

    borrowed: adapters that no row of the input names; they are compared on rows of others.
    """

    requests: tuple[Request, ...]
    lines: tuple[int, ...]
    borrowed: tuple[str, ...] = ()


class Spread:
    """Keeps between `size` and 2 · `size` of the entries that pass, evenly spread, without knowing how many will come.

    Every `stride`-th entry is kept; when there are too many, every second one goes and the stride doubles.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._stride = 1
        self._seen = 0
        self._kept: list[tuple[int, Request]] = []

    def add(self, line: int, request: Request) -> None:
        """Takes the next entry."""
        if self._seen % self._stride == 0:
            self._kept.append((line, request))
            if len(self._kept) > 2 * self._size:
                self._kept = self._kept[::2]
                self._stride *= 2
        self._seen += 1

    def chosen(self) -> list[tuple[int, Request]]:
        """At most `size` entries, in the order in which they came."""
        count = len(self._kept)
        if count <= self._size:
            return list(self._kept)
        return [self._kept[i * count // self._size] for i in range(self._size)]


def take_sample(requests: Iterable[tuple[int, Request]], adapters: Sequence[str], size: int) -> Sample:
    """At most `size` requests of the base and of each of `adapters`. `requests` come with their line.

    The base is always compared, as the control: where it is off, adapters must be off too. Raises `InputError` if there
    is no request at all.
    """
    everything = Spread(size)
    spreads = {name: Spread(size) for name in (BASE_ADAPTER, *adapters)}
    last = None
    for line, request in requests:
        if line != last:  # a row under several adapters is one row
            everything.add(line, request)
        last = line
        spreads[request.adapter].add(line, request)
    chosen: list[tuple[int, Request]] = []
    borrowed = []
    for name, spread in spreads.items():
        own = spread.chosen()
        if not own:
            own = [(line, replace(request, adapter=name)) for line, request in everything.chosen()]
            if name != BASE_ADAPTER:
                borrowed.append(name)
        chosen += own
    if not chosen:
        raise InputError("no row of the input can be scored, so there is nothing to compare")
    return Sample(
        requests=tuple(request for _, request in chosen),
        lines=tuple(line for line, _ in chosen),
        borrowed=tuple(borrowed),
    )
