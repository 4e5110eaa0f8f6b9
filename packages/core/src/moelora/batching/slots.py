"""Which adapter lies in which slot, from batch to batch. Knows neither the device nor when anything is copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from moelora.batching.planner import PlannedBatch

T = TypeVar("T")


class SlotSchedule:
    """Gives every adapter of a batch a slot: its own where it has one, else the one that was left the longest ago.

    A pure function of the batches placed so far, so that a plan without a device counts the same loads as a run, and
    batches can be placed long before they run.
    """

    def __init__(self, slots: int) -> None:
        self.loads = 0
        self._tenants: list[str | None] = [None] * slots
        self._last_use = [-1] * slots
        self._batches = 0

    def place(self, planned: PlannedBatch) -> dict[str, int]:
        """The slot of every adapter in `planned.adapters`, which must be no more than there are slots."""
        slot_of = {name: self._tenants.index(name) for name in planned.adapters if name in self._tenants}
        taken = set(slot_of.values())
        free = sorted((s for s in range(len(self._tenants)) if s not in taken), key=self._last_use.__getitem__)
        for name in planned.adapters:
            if name not in slot_of:
                slot = slot_of[name] = free.pop(0)
                self._tenants[slot] = name
                self.loads += 1
        for slot in slot_of.values():
            self._last_use[slot] = self._batches
        self._batches += 1
        return slot_of


def look_ahead(items: Iterable[T], depth: int) -> Iterator[tuple[T, list[T]]]:
    """Each item with up to `depth` of those that follow it."""
    source = iter(items)
    queue = deque(islice(source, depth + 1))
    while queue:
        current = queue.popleft()
        yield current, list(queue)
        queue.extend(islice(source, 1))
