"""An n-gram drafter in NumPy. It uses the public contract alone: gRPC and shared memory.

    python examples/numpy_drafter/main.py --tokenizer DIR --listen unix:PATH

`docs/write-a-drafter.md` walks through it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from fingerprint import tokenizer_fingerprint
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from servicer import DraftServicer

from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc

PROTOCOL_VERSION = 2
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SWITCH_INTERVAL_S = 0.0005
"""gRPC's threads and the stream's share one interpreter: by default a command may wait 5 ms for its turn."""
OPTIONS = (
    # By default a second server shares a TCP port silently.
    ("grpc.so_reuseport", 0),
    # The scheduler pings every 2 seconds, for which gRPC closes the connection by default.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
)


def main() -> int:
    """Serves until a signal, or until a step fails; returns the exit status."""
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    description = _describe(arguments)
    # Blocked in all threads, so that they wait for `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    broken = threading.Event()

    def fail() -> None:
        broken.set()
        os.kill(os.getpid(), signal.SIGTERM)

    server = grpc.server(ThreadPoolExecutor(8), options=OPTIONS)
    pb_grpc.add_WorkerServicer_to_server(DraftServicer(description, fail), server)  # type: ignore[no-untyped-call]
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    os.umask(0o177)  # other users may not connect to the socket
    server.add_insecure_port(arguments.listen)
    server.start()
    for name in ("", "slipstream.v1.Worker"):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    logging.info("serving %s at %s", description.model, arguments.listen)
    signal.sigwait(SIGNALS)
    checks.enter_graceful_shutdown()
    server.stop(0 if broken.is_set() else 1.0).wait()
    return int(broken.is_set())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An n-gram drafter in NumPy.")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="The target's directory.")
    parser.add_argument("--listen", required=True, metavar="unix:PATH", help="Where to serve.")
    parser.add_argument("--vocab-size", type=int, help="Number of token ids; by default what DIR/config.json says.")
    parser.add_argument("--dtype", default="float32", help="What the target computes in.")
    return parser.parse_args()


def _describe(arguments: argparse.Namespace) -> pb.DescribeResponse:
    vocab_size = arguments.vocab_size
    if vocab_size is None:
        vocab_size = json.loads((arguments.tokenizer / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return pb.DescribeResponse(
        role="draft",
        protocol_version=PROTOCOL_VERSION,
        device="cpu",
        vocab_size=vocab_size,
        tokenizer_sha256=tokenizer_fingerprint(arguments.tokenizer),
        dtype=arguments.dtype,
        max_context_tokens=2**24,  # counts have no limit of their own
        kv_bytes_per_token=0,
        algorithm="numpy_ngram",
        model="numpy-ngram",
        pid=os.getpid(),
    )


if __name__ == "__main__":
    sys.exit(main())
