"""Words that go with a number."""

from collections import Counter
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """The number with its noun, whose plural ends in s: "1 part", "2,048 parts"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: "40 s", "12 min", "27 h 10 min"."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def measured(seconds: float) -> str:
    """Seconds with a decimal, of less than one the two figures that a rate over them needs: "12.3 s", "0.044 s"."""
    if seconds >= 1 or seconds <= 0:
        return f"{seconds:.1f} s"
    return f"{seconds:.2g} s" if seconds >= 0.001 else "under 0.001 s"


def repeated(names: Iterable[str]) -> str:
    """Names in their order, those that come again as a number: "2 × cpu", "cuda:0, cuda:1"."""
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in Counter(names).items())
