"""Which ids were seen before, in about 20 bytes a row: an input of a hundred million rows must still be checked."""

from __future__ import annotations

_RECORD = 12
_HASH = 8
_BUCKET_BITS = 14


class IdClaims:
    """The line that claimed each id first. Ids are known by 64 bits of their hash.

    Among a million ids two are taken for one another once in thirty million runs.
    """

    def __init__(self) -> None:
        self._buckets: list[bytearray | None] = [None] * (1 << _BUCKET_BITS)

    def claim(self, identity: str, line: int) -> int:
        """The line that has the id: `line` itself if none had it before. Lines beyond 2³² count as that."""
        key = hash(identity)
        wanted = key.to_bytes(_HASH, "little", signed=True)
        index = key & ((1 << _BUCKET_BITS) - 1)
        bucket = self._buckets[index]
        if bucket is None:
            bucket = self._buckets[index] = bytearray()
        at = bucket.find(wanted)
        while at % _RECORD and at >= 0:  # bytes of two records, or of a line number
            at = bucket.find(wanted, at + 1)
        if at >= 0:
            return int.from_bytes(bucket[at + _HASH : at + _RECORD], "little")
        bucket += wanted + min(line, (1 << 32) - 1).to_bytes(_RECORD - _HASH, "little")
        return line
