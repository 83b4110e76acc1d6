"""What of a device's memory goes where, and how many KV pages that leaves room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.common.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.worker.contract import DeviceMemory, WorkerDescription

MIB = 2**20
HOST_KV_BYTES = 512 * MIB
"""KV pages where the memory is the host's, and nothing was said."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One epoch's plan, made when both workers have loaded their weights."""

    workers: Sequence[WorkerDescription]
    page_bytes: int
    """KV that a page holds, of both workers together."""
    step_tokens: int
    """Tokens of the largest step."""
    step_choices: int
    """Tokens that are chosen in the largest step."""
    reserve_bytes: int
    """What is to be left free where nobody said how much may be taken."""

    @property
    def is_on_host(self) -> bool:
        """Whether the workers compute in the host's memory, which nobody counts."""
        return not any(worker.memory.total for worker in self.workers)

    @property
    def free(self) -> int:
        """Bytes that nobody has taken: by the word of the worker that loaded last."""
        return min(worker.memory.free for worker in self.workers if worker.memory.total)

    @property
    def work(self) -> int:
        """Bytes that the workers will take beside KV pages."""
        return sum(_work(worker.memory, self.step_tokens, self.step_choices) for worker in self.workers)

    def pages_that_fit(self, *, at_least: int, of: str) -> int:
        """Pages that there is room for. Raises OutOfMemoryError if they are fewer than `at_least`, the KV `of` what."""
        if self.is_on_host:
            return max(at_least, HOST_KV_BYTES // self.page_bytes)
        num_pages = (self.free - self.work - self.reserve_bytes) // self.page_bytes
        if num_pages < at_least:
            raise self._too_little(at_least, of, self.reserve_bytes)
        return int(num_pages)

    def check(self, num_pages: int) -> None:
        """Raises OutOfMemoryError if so many pages do not fit beside everything else."""
        if not self.is_on_host and self.work + num_pages * self.page_bytes > self.free:
            raise self._too_little(num_pages, f"{num_pages} pages", 0)

    def mib(self, num_pages: int) -> int:
        """What so many pages take, rounded up."""
        return -(-num_pages * self.page_bytes // MIB)

    def _too_little(self, num_pages: int, of: str, reserve: int) -> OutOfMemoryError:
        needed = num_pages * self.page_bytes + self.work + reserve
        weights = " and ".join(
            f"{worker.memory.weights / MIB:.0f} MiB ({worker.role.value})" for worker in self.workers
        )
        return OutOfMemoryError(
            f"GPU memory: {needed / MIB:.0f} MiB are needed and {self.free / MIB:.0f} MiB of "
            f"{self.workers[0].memory.total / MIB:.0f} MiB are free: KV pages {self.mib(num_pages)} MiB ({of}), "
            f"graphs and steps {self.work / MIB:.0f} MiB, reserve {reserve / MIB:.0f} MiB; weights have taken "
            f"{weights}. Less is needed with a smaller context_tokens, slots, chunk_tokens or kv_memory_mib"
        )


def _work(memory: DeviceMemory, num_tokens: int, num_choices: int) -> int:
    return memory.work + memory.work_per_token * num_tokens + memory.work_per_choice * num_choices
