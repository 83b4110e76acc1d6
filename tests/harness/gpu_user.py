"""A process that uses another one's arena as it is told on its standard input, line by line.

    open MANIFEST           the manifest in hex; answers "opened" or the error
    close                   answers "unmapped", or "mapped" while views are kept with `keep NAME`
    keep NAME
    fill NAME VALUE         stream work, like all up to `stamp`
    copy NAME INDEX         the first element of NAME into "seen" at INDEX
    spin MICROSECONDS
    signal FENCE VALUE      also `wait`; the fence by its number
    stamp INDEX             into "stamps"
    many COUNT LINE         the line again and again, with `{}` for 1 to COUNT
    sync SECONDS            answers "done", "late" or the error
    read NAME               the elements, as numbers
    release FENCE VALUE

Each line is answered when it is enqueued, or done.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

import torch

from slipstream.benchmarks.spin_kernel import SpinKernel
from slipstream.common.device.cuda.arena import CudaArena
from slipstream.common.device.cuda.device import CudaDevice
from slipstream.common.errors import DeadlineExceededError, SlipstreamError
from slipstream.common.wire.manifest import Manifest
from slipstream.common.wire.step import FenceName
from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from slipstream.common.device.cuda.arena import WrittenArena


class GpuUser:
    """Carries out the lines."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.stream = self.device.create_stream("other", lambda error: print(repr(error), file=sys.stderr))
        self.stream.bind_thread()
        self.arena: CudaArena | WrittenArena | None = None
        self.kept: list[torch.Tensor] = []
        self.kernel = SpinKernel(self.device.driver)
        self.start = torch.zeros(1, dtype=torch.int64, device=self.device.torch_device)

    def answer(self, line: str) -> str:
        """Does what a line says."""
        match line.split(maxsplit=2):
            case ["open", manifest]:
                self.arena = self.device.open_arena(Manifest.from_pb(pb.Manifest.FromString(bytes.fromhex(manifest))))
                return "opened"
            case ["close"]:
                return self._close()
            case ["keep", name]:
                self.kept.append(self._arena.tensor(name))
            case ["fill", name, value]:
                self._fill(name, float(value))
            case ["copy", name, index]:
                self._copy(name, int(index))
            case ["spin", microseconds]:
                self._spin(round(1000 * float(microseconds)))
            case ["signal", fence, value]:
                self._arena.fence(FenceName(int(fence))).signal(self.stream, int(value))
            case ["wait", fence, value]:
                self._arena.fence(FenceName(int(fence))).wait(self.stream, int(value))
            case ["stamp", index]:
                self.device.stamp(self.stream, self._arena.tensor("stamps")[int(index)])
            case ["many", count, rest]:
                for number in range(1, int(count) + 1):
                    for part in rest.replace("{}", str(number)).split(";"):
                        self.answer(part.strip())
            case ["sync", seconds]:
                self.stream.synchronize(float(seconds))
                return "done"
            case ["read", name]:
                tensor = self.kept[-1] if name == "kept" else self._arena.tensor(name)
                return " ".join(map(str, self.device.to_host([tensor])[0].flatten().tolist()))
            case ["release", fence, value]:
                self._arena.fence(FenceName(int(fence))).release(int(value))
        return "ok"

    @property
    def _arena(self) -> CudaArena | WrittenArena:
        assert self.arena is not None, "open comes first"
        return self.arena

    def _close(self) -> str:
        assert isinstance(self._arena, CudaArena), "it is of the device"
        assert self._arena.memory is not None, "it is open"
        memory = weakref.ref(self._arena.memory)
        self._arena.close()
        self.arena = None
        return "unmapped" if memory() is None else "mapped"

    def _fill(self, name: str, value: float) -> None:
        tensor = self._arena.tensor(name)
        self.stream.enqueue(lambda: _fill(tensor, value))

    def _copy(self, name: str, index: int) -> None:
        source, target = self._arena.tensor(name).flatten()[0], self._arena.tensor("seen")[index]
        self.stream.enqueue(lambda: _copy(target, source))

    def _spin(self, length_ns: int) -> None:
        handle, start = self.stream.handle, self.start.data_ptr()
        self.device.stamp(self.stream, self.start[0])
        self.stream.enqueue(lambda: self.kernel.spin_until(handle, start, length_ns))


def _fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def main() -> None:
    """Runs until the input ends."""
    user = GpuUser()
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            print(user.answer(line.strip()), flush=True)
        except DeadlineExceededError:
            print("late", flush=True)
        except SlipstreamError as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
