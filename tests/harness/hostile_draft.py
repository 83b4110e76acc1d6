"""A draft service that writes random bytes over all the memory that it maps, all the time.

    python hostile_draft.py SEED REPORT DRAFT-OPTION...

With the seed "hold" it writes nothing else than 0 to its own fence, without a pause.

On a CPU it maps memory that it is given to read once more, for writing, and goes on after it has let it go: a process
that keeps to no contract can. On a GPU it stops then, since the memory may belong to anything by that time. REPORT gets
the number of writes so far.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.manifest import Manifest
from slipstream.common.wire.step import DRAFT_FENCES

PAUSE_S = 0.0003
"""Between two writes, at most: many in a step."""
LONGEST_HOLD_S = 0.5
"""For so long a fence is held at a value, now and then."""
REPORT_EVERY = 50
HOLD = "hold"
_ZERO = bytes(8)
WORDS = (0, 1, 2, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
LENGTHS = (8, 256, 2**22)


class Vandal:
    """Scribbles over one arena, on a thread of its own."""

    _num_writes = 0

    def __init__(self, manifest: Manifest, write: Callable[[int, bytes], None], seed: int, report: Path) -> None:
        """`write`: writes bytes at an offset of the arena."""
        self._manifest = manifest
        self._write = write
        self._rng = random.Random(seed)
        self._report = report
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vandal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when it writes no more."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        rng, size = self._rng, self._manifest.size
        while not self._is_over.wait(rng.random() * PAUSE_S):
            if rng.randrange(4) == 0:
                self._hold_a_fence()
            else:
                offset = rng.randrange(size)
                length = min(rng.choice(LENGTHS), size - offset)
                self._scribble(offset, rng.choice((rng.randbytes(length), bytes(length), b"\xff" * length)))

    def _hold_a_fence(self) -> None:
        rng, word = self._rng, self._rng.choice(self._manifest.fences)
        value = struct.pack("<Q", rng.choice((*WORDS, rng.getrandbits(64))))
        until = time.monotonic() + (rng.random() * LONGEST_HOLD_S if rng.randrange(100) == 0 else 0.0)
        self._scribble(word.offset, value)
        while time.monotonic() < until and not self._is_over.wait(PAUSE_S):
            self._scribble(word.offset, value)

    def _scribble(self, offset: int, data: bytes) -> None:
        self._write(offset, data)
        Vandal._num_writes += 1
        if Vandal._num_writes % REPORT_EVERY == 0:
            self._report.write_text(str(Vandal._num_writes))


def host_writer(manifest: Manifest) -> Callable[[int, bytes], None]:
    """Maps a file for writing."""
    descriptor = os.open(manifest.path, os.O_RDWR | os.O_CLOEXEC)
    memory = mmap.mmap(descriptor, manifest.size)
    os.close(descriptor)

    def write(offset: int, data: bytes) -> None:
        memory[offset : offset + len(data)] = data

    return write


class Holder(Vandal):
    """Holds the fences of a draft at 0."""

    def _run(self) -> None:
        offsets = [word.offset for word in self._manifest.fences if word.fence in DRAFT_FENCES]
        self._report.touch()
        while offsets and not self._is_over.is_set():
            for offset in offsets:
                self._write(offset, _ZERO)


def gpu_writer(device: Any, memory: Any) -> Callable[[int, bytes], None]:
    """Writes on a stream of its own. `device`: a CudaDevice; `memory`: a CudaMemory."""
    from cuda.bindings import driver as cu

    stream = device.driver.create_stream()

    def write(offset: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        target = memory.address + offset
        device.driver.call(cu.cuMemcpyHtoDAsync, target, ctypes.addressof(source), len(data), stream)
        device.driver.call(cu.cuStreamSynchronize, stream)

    return write


def vandalise_host(new_vandal: Callable[..., Vandal]) -> None:
    """Has a vandal for each arena that is opened from now on."""
    honest: Any = HostDevice.open_arena

    def open_arena(device: HostDevice, manifest: Manifest, **how: bool) -> object:
        arena = honest(device, manifest, **how)
        new_vandal(manifest, host_writer(manifest))
        return arena

    HostDevice.open_arena = open_arena  # type: ignore[assignment, method-assign]


def vandalise_gpu(new_vandal: Callable[..., Vandal]) -> None:
    """Has a vandal for each arena that is opened from now on, until it is closed."""
    from slipstream.common.device.cuda.arena import CudaArena
    from slipstream.common.device.cuda.device import CudaDevice

    honest_open: Any = CudaDevice.open_arena
    honest_close: Any = CudaArena.close
    vandals: dict[int, Vandal] = {}

    def open_arena(device: CudaDevice, manifest: Manifest, **how: bool) -> CudaArena:
        arena: CudaArena = honest_open(device, manifest, **how)
        vandals[id(arena)] = new_vandal(manifest, gpu_writer(device, arena.memory))
        return arena

    def close(arena: CudaArena) -> None:
        if (vandal := vandals.pop(id(arena), None)) is not None:
            vandal.stop()
        honest_close(arena)

    CudaDevice.open_arena = open_arena  # type: ignore[assignment, method-assign]
    CudaArena.close = close  # type: ignore[method-assign]


def hostile_program(seed: int | str, report: Path) -> tuple[str, ...]:
    """Python's arguments for this program, before those of a draft service."""
    return __file__, str(seed), str(report)


def main() -> None:
    """Serves as the draft service does."""
    seed, report = sys.argv.pop(1), Path(sys.argv.pop(1))
    rng, make = random.Random(seed), Holder if seed == HOLD else Vandal

    def new_vandal(manifest: Manifest, write: Callable[[int, bytes], None]) -> Vandal:
        return make(manifest, write, rng.getrandbits(64), report)

    vandalise = vandalise_gpu if "cuda" in sys.argv else vandalise_host
    vandalise(new_vandal)
    from slipstream.services.draft_main import main as serve

    serve()


if __name__ == "__main__":
    main()
