"""Slots: rows of running requests in every shared buffer, told apart in time by generations."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.common.worker.layout import PADDING_SLOT


@dataclass(frozen=True, slots=True)
class SlotLease:
    """A slot for as long as one request has it."""

    slot: int
    generation: int
    """No two leases of a slot have the same: a result that names another generation belongs to somebody else."""


class SlotAllocator:
    """Hands out slots 1 and up; row 0 is padding."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: row 0 included."""
        self.num_slots = num_slots - 1
        """Slots that can be handed out."""
        self._free = list(range(num_slots - 1, PADDING_SLOT, -1))
        self._generations = [0] * num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be handed out now."""
        return len(self._free)

    def allocate(self) -> SlotLease:
        """Takes a slot; there must be a free one."""
        assert self._free, "whoever takes a slot has looked whether one is free"
        slot = self._free.pop()
        self._generations[slot] += 1
        return SlotLease(slot, self._generations[slot])

    def release(self, lease: SlotLease) -> None:
        """Gives a slot back; the lease is not current from now on."""
        assert self.is_current(lease), f"slot {lease.slot}: generation {lease.generation} is over"
        self._generations[lease.slot] += 1
        self._free.append(lease.slot)

    def is_current(self, lease: SlotLease) -> bool:
        """Whether the request that was given this lease still has the slot."""
        return self._generations[lease.slot] == lease.generation
