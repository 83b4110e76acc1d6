"""A process that does to a counter in a file what it is told on its standard input, line by line.

    python fence_user.py PATH OFFSET

`store N`; `wait N SECONDS`, which answers the counter or `late`; `follow TURNS CELL`, which takes every second
turn of the counter and answers the 64-bit numbers that it saw at CELL. Each line is answered when it is done.
"""

from __future__ import annotations

import mmap
import struct
import sys

from slipstream.common.device.cpu.fence import HostFence


def main(path: str, offset: str) -> None:
    """Runs until the input ends."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    word = HostFence(memoryview(memory), int(offset))
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["store", value]:
                word.store(int(value))
                print("stored", flush=True)
            case ["wait", value, timeout_s]:
                print(word.poll() if word.wait_on_host(int(value), float(timeout_s)) else "late", flush=True)
            case ["follow", turns, cell]:
                print(*follow(word, memory, int(turns), int(cell)), flush=True)


def follow(word: HostFence, memory: mmap.mmap, turns: int, cell: int) -> list[int]:
    """The numbers at `cell` when the counter was 1, 3, ..."""
    seen = []
    for turn in range(1, 2 * turns, 2):
        word.wait_on_host(turn, 30.0)
        seen.append(struct.unpack_from("<q", memory, cell)[0])
        word.store(turn + 1)
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
