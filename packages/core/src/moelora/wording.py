"""Words that go with a number."""


def counted(number: int, noun: str) -> str:
    """The number with its noun, whose plural ends in s: "1 part", "2,048 parts"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
