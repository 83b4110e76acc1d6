"""A process at one end of a hand-over: `python -m slipstream.cli.doctor.peer`, told by lines what to do.

Answers each line with one: "ok", what was asked for, or "error" and why.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slipstream.common.device.choose import choose_device
from slipstream.common.worker.step import FenceName
from slipstream.common.worker.wire import manifest_from_pb
from slipstream.protos import worker_pb2

if TYPE_CHECKING:
    from slipstream.common.device.interface import Arena, Fence

HERE, THERE = FenceName.DRAFT_DONE, FenceName.VERIFY_STASH
"""The fence that the first process signals, and the one that the second process signals."""
TIMEOUT_S = 20.0


class Peer:
    """An arena that is open here, and this process's stream."""

    def __init__(self, device: str, fence: str, manifest: str) -> None:
        """`manifest`: in hex, as on the wire. Raises ManifestError, DeviceError."""
        self._device = choose_device(device, fence)
        self._arena: Arena = self._device.open_arena(
            manifest_from_pb(worker_pb2.Manifest.FromString(bytes.fromhex(manifest)))
        )
        self._stream = self._device.create_stream("peer", lambda error: None)

    def describe(self) -> str:
        """Says if this process is under MPS."""
        return "under MPS" if self._device.under_mps else "without MPS"

    def lead(self, gate: int, last: int) -> str:
        """Once `gate` is let through: signals each value behind it, waits for its answer, and stamps the time."""
        here, there, stamps = self._fence(HERE), self._fence(THERE), self._arena.tensor("stamps")
        there.wait(self._stream, gate)
        self._device.stamp(self._stream, stamps[gate])
        for value in range(gate + 1, last + 1):
            here.signal(self._stream, value)
            there.wait(self._stream, value)
            self._device.stamp(self._stream, stamps[value])
        return "ok"

    def follow(self, first: int, last: int) -> str:
        """Waits for each value, and answers it."""
        for value in range(first, last + 1):
            self._fence(HERE).wait(self._stream, value)
            self._fence(THERE).signal(self._stream, value)
        return "ok"

    def ask(self, value: int) -> str:
        """Writes the value, and signals that it did."""
        row = self._arena.tensor("questions")[value : value + 1]
        self._stream.enqueue(lambda: _set(row, value))
        self._fence(HERE).signal(self._stream, value)
        return "ok"

    def answer(self, value: int) -> str:
        """Waits for the value, and writes what it read, plus one."""
        questions, answers = self._arena.tensor("questions"), self._arena.tensor("answers")
        self._fence(HERE).wait(self._stream, value)
        self._stream.enqueue(lambda: _set(answers[value : value + 1], questions[value : value + 1] + 1))
        self._fence(THERE).signal(self._stream, value)
        return "ok"

    def finish(self) -> str:
        """Returns when all is done."""
        self._stream.synchronize(TIMEOUT_S)
        return "ok"

    def _fence(self, name: FenceName) -> Fence:
        return self._arena.fence(name)


def _set(row: object, value: object) -> None:
    row[:] = value  # type: ignore[index]


def main() -> None:
    """Until there are no more lines."""
    peer: Peer | None = None
    for line in sys.stdin:
        word, *arguments = line.split()
        try:
            if peer is None:
                peer = Peer(word, *arguments)
                answer = peer.describe()
            else:
                answer = getattr(peer, word)(*map(int, arguments))
        except Exception as error:
            answer = f"error {type(error).__name__}: {' '.join(str(error).split())}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
