"""A process that maps an arena of the CPU for reading and does what it is told on its standard input, line by line.

    python arena_reader.py MANIFEST

MANIFEST is in hexadecimal. `read NAME`; `write NAME`; `store FENCE N`; `poll FENCE`; `wait FENCE N SECONDS`, which
answers whether N was reached; `release FENCE N`; `release-later FENCE N SECONDS`. Each line is answered when it is
done.
"""

from __future__ import annotations

import sys
import threading

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import SlipstreamError
from slipstream.common.wire.manifest import Manifest
from slipstream.common.wire.step import FenceName
from slipstream.protos import worker_pb2 as pb


def main(manifest: str) -> None:
    """Runs until the input ends."""
    message = pb.Manifest.FromString(bytes.fromhex(manifest))
    arena = HostDevice().open_arena(Manifest.from_pb(message), read_only=True)
    print("ready", flush=True)
    for line in sys.stdin:
        answer: object = "ok"
        match line.split():
            case ["read", name]:
                answer = " ".join(map(str, arena.tensor(name).flatten().tolist()))
            case ["write", name]:
                arena.tensor(name).fill_(7)
            case ["store", fence, value]:
                try:
                    arena.fence(FenceName[fence]).store(int(value))
                except SlipstreamError as error:
                    answer = error
            case ["poll", fence]:
                answer = arena.fence(FenceName[fence]).poll()
            case ["wait", fence, value, timeout_s]:
                answer = arena.fence(FenceName[fence]).wait_on_host(int(value), float(timeout_s))
            case ["release", fence, value]:
                arena.fence(FenceName[fence]).release(int(value))
            case ["release-later", fence, value, delay_s]:
                threading.Timer(float(delay_s), arena.fence(FenceName[fence]).release, [int(value)]).start()
        print(answer, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
