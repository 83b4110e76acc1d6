"""Ranks on the GPUs of one host: NCCL, and all-reduces through memory that each GPU maps of the others.

Each of three all-reduces is the fastest at some size; which one at which is measured when the ranks meet. In the
one-shot all-reduce of PyTorch's symmetric memory every GPU reads all parts, in the two-shot one it adds up a piece of
them and reads the others' sums; both add up in the order of the ranks. NCCL takes what is larger than the memory.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from slipstream.services.models.ranks import TIMEOUT, Channel, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.services.models.config import Rank

    Sum = Callable[[torch.Tensor], torch.Tensor]

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    # Multicast over NVLink hangs where the host does not allow it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Rank 0 captures a graph before the others do: no rank may wait for another one while it captures.
    "NCCL_GRAPH_REGISTER": "0",
    # Else it listens at an address that other hosts reach.
    "NCCL_SOCKET_IFNAME": "lo",
}
SHARED_BYTES = 2**25
"""The largest part that is added up through symmetric memory."""
_MEASURED = tuple(2**power for power in range(13, 26))
"""Sizes in bytes at which the all-reduces are timed."""
_REPEATS = 20
_TURNS = 3
_SHARED_DTYPES = (torch.bfloat16, torch.float32)


class CudaRanks(Ranks):
    """Implements the collectives on the current stream; they may be captured in graphs."""

    def __init__(self, rank: Rank, store: Any, device: torch.device, channel: Channel | None = None) -> None:
        """Uses the thread's current stream, on `device`."""
        self._device = device
        super().__init__(rank, store, channel)
        self._name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._shared = self._share()
        self._chosen: list[Sum] = [self._by_nccl] * len(_MEASURED)
        """The all-reduce of parts up to each of the sizes."""
        if self._shared is not None:
            self._choose()

    def _meet(self, store: Any) -> Any:
        os.environ.update(ENVIRONMENT)
        number, size = self.rank.number, self.rank.size
        dist.init_process_group(
            "nccl", store=store, rank=number, world_size=size, timeout=TIMEOUT, device_id=self._device
        )
        dist.all_reduce(torch.zeros(1, device=self._device))  # makes the communicator, which no graph can
        return dist.group.WORLD

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """See `Ranks.sum`. NCCL adds up in an order of its own, the same for all ranks."""
        part = part.contiguous()
        place = bisect_left(_MEASURED, part.nbytes)
        if place == len(_MEASURED) or part.dtype not in _SHARED_DTYPES or not part.numel():
            return self._by_nccl(part)
        return self._chosen[place](part)

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        count, columns = self.rank.size, part.shape[-1]
        parts = part.new_empty(count, *part.shape)
        dist.all_gather_into_tensor(parts, part.contiguous())
        return parts.movedim(0, -2).reshape(*part.shape[:-1], count * columns)

    def broadcast(self, values: torch.Tensor) -> None:
        if values.numel():
            dist.broadcast(values, 0)

    def tell(self, do: str, **arguments: Any) -> None:
        """See `Ranks.tell`. What is told while a graph is captured is kept for `captured`."""
        if torch.cuda.is_current_stream_capturing():
            self.captured.append({"do": do, **arguments})
        else:
            super().tell(do, **arguments)

    def _share(self) -> torch.Tensor | None:
        """Maps each rank's buffer on all GPUs, [SHARED_BYTES] uint8; None where one cannot."""
        shared = None
        try:
            shared = symmetric_memory.empty(SHARED_BYTES, dtype=torch.uint8, device=self._device)
            symmetric_memory.rendezvous(shared, self._name)
        except RuntimeError as error:
            logger.warning("all-reduces are NCCL's only, as memory cannot be shared: %s", str(error).partition("\n")[0])
        can = torch.tensor(int(shared is not None), device=self._device)
        dist.all_reduce(can, dist.ReduceOp.MIN)
        return shared if can.item() else None

    def _place(self, part: torch.Tensor) -> torch.Tensor:
        assert self._shared is not None, "it is only used where it is there"
        return self._shared[: part.nbytes].view(part.dtype).view(part.shape)

    def _by_nccl(self, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    def _one_shot(self, part: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(self._place(part), part, "sum", self._name)
        return total

    def _two_shot(self, part: torch.Tensor) -> torch.Tensor:
        place, total = self._place(part), torch.empty_like(part)
        place.copy_(part)
        torch.ops.symm_mem.two_shot_all_reduce_out(place, "sum", self._name, total)
        return total

    def _choose(self) -> None:
        """Times all of them at each size; all ranks then choose the same, by the slowest rank."""
        ways = (self._by_nccl, self._one_shot, self._two_shot)
        taken = torch.tensor([[self._microseconds(way, size) for way in ways] for size in _MEASURED])
        slowest = taken.to(self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self._chosen = [ways[way] for way in slowest.argmin(dim=1).tolist()]
        names = ("NCCL", "one-shot", "two-shot")
        for size, times, way in zip(_MEASURED, slowest.tolist(), self._chosen, strict=True):
            each = ", ".join(f"{name} {time:.1f}" for name, time in zip(names, times, strict=True))
            logger.info("all-reduce of %d KiB: %s us; chosen: %s", size // 1024, each, names[ways.index(way)])

    def _microseconds(self, way: Sum, num_bytes: int) -> float:
        """The time of an all-reduce in a graph."""
        part = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=self._device)
        way(part)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_REPEATS):
            way(part)
        graph.capture_end()
        return median(_elapsed_us(partial(graph.replay)) for _ in range(_TURNS)) / _REPEATS


def _elapsed_us(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return 1e3 * elapsed_ms
