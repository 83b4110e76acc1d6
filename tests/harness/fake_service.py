"""A service in miniature: gRPC health on an address, told by its options and by signals what goes wrong.

SIGTERM ends it (unless it is deaf), removing its socket; SIGUSR1 makes it die with status 7.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> None:
    """Serves until told otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--ready-when", type=Path, help="SERVING once this file exists")
    parser.add_argument("--die-at-once", action="store_true")
    parser.add_argument("--die-when", type=Path, help="dies once this file exists, at the start at once")
    parser.add_argument("--stop-when", type=Path, help="stops at the start, as by SIGSTOP, if this file exists")
    parser.add_argument("--status", type=int, default=1, help="exit status of a death at the start")
    parser.add_argument("--deaf", type=int, default=0, help="ignore this many SIGTERM")
    parser.add_argument("--journal", type=Path, help="gets a line for each SIGTERM")
    options = parser.parse_args()
    print("fake service speaking", flush=True)

    def must_die() -> bool:
        return options.die_at_once or (options.die_when is not None and options.die_when.exists())

    if must_die():
        print("fake service cannot load its model", file=sys.stderr)
        sys.exit(options.status)
    if options.stop_when is not None and options.stop_when.exists():
        os.kill(os.getpid(), signal.SIGSTOP)

    num_terms = 0

    def on_term(_number: int, _frame: object) -> None:
        nonlocal num_terms
        num_terms += 1
        if options.journal:
            with options.journal.open("a") as journal:
                journal.write(f"{options.listen} SIGTERM\n")

    def on_usr1(_number: int, _frame: object) -> None:
        sys.exit(7)

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGUSR1, on_usr1)
    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server.add_insecure_port(options.listen)
    server.start()
    is_ready = False
    # Not an Event: its lock may be held by the very code that a signal's handler interrupts.
    while num_terms <= options.deaf:
        time.sleep(0.01)
        if must_die():
            sys.exit(7)
        if not is_ready and (options.ready_when is None or options.ready_when.exists()):
            servicer.set("", health_pb2.HealthCheckResponse.SERVING)
            is_ready = True
    server.stop(0).wait()
    if options.listen.startswith("unix:"):
        Path(options.listen.removeprefix("unix:")).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
