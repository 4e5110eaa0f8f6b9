"""Brings the adapters of each batch onto the device, and those of the next batches while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moelora.adapters.bank import AdapterBank
from moelora.adapters.host import HostAdapters
from moelora.batching.planner import PlannedBatch
from moelora.batching.slots import SlotSchedule

LOOK_AHEAD = 64
"""Batches that are placed ahead of the one that runs: seconds of work, about what the slowest disk needs."""

Placement = Mapping[str, int]
"""The slot of every adapter that a batch wants resident."""


class Residency:
    """Between the host's adapters and the bank. One thread at a time.

    Calls come in this order: `place` for every batch, in the order of the plan and well ahead; then for each batch
    `bring`, the forward, `prefetch` as soon as the body is queued, and `release` when all of the batch is queued.
    What the bank really holds decides what is loaded, so that neither a prefetch that did not happen nor another
    thread's batches in between can do harm.
    """

    def __init__(self, host: HostAdapters, bank: AdapterBank) -> None:
        self._host = host
        self._bank = bank
        self._schedule = SlotSchedule(bank.num_slots)

    def place(self, planned: PlannedBatch) -> Placement:
        """Chooses slots for a batch."""
        return self._schedule.place(planned)

    def bring(self, placement: Placement) -> None:
        """Loads what is not there yet. The forward that is queued next runs behind these and earlier copies."""
        for name, slot in placement.items():
            if self._bank.residents[slot] != name:
                self._bank.load(slot, self._host.take(name))
        self._bank.begin_reading(placement.values())

    def prefetch(self, current: Placement, upcoming: Sequence[Placement]) -> None:
        """Queues copies of what the upcoming batches need into slots that nothing before them needs; never waits.

        Adapters that are not in host memory are read meanwhile, in a thread of their own.
        """
        tenants = list(self._bank.residents)
        wanted = set(current.values())  # slots whose tenants are needed before the batch that is looked at
        to_read: dict[str, None] = {}
        for placement in upcoming:
            for name, slot in placement.items():
                if tenants[slot] == name or name in to_read:
                    continue
                if slot not in wanted and self._host.is_ready(name):
                    self._bank.load(slot, self._host.take(name))
                    tenants[slot] = name
                else:
                    to_read[name] = None
            wanted.update(placement.values())
        self._host.get_ready(to_read)

    def release(self, placement: Placement) -> None:
        """The batch that was brought is queued completely."""
        self._bank.end_reading(placement.values())
