"""The process of a drafter: its options, its description, the server, its end."""

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
from typing import TYPE_CHECKING, Any

import grpc
from fingerprint import tokenizer_fingerprint
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from servicer import DraftServicer

from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from servicer import Epoch

PROTOCOL_VERSION = 4
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SWITCH_INTERVAL_S = 0.0005
"""gRPC's threads and the stream's share one interpreter: by default a command may wait 5 ms for its turn."""
OPTIONS = (
    # By default a second server shares a TCP port silently.
    ("grpc.so_reuseport", 0),
    # The scheduler pings every 2 seconds, for which gRPC closes the connection by default.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # By default 4 MiB, and a command names all pages of the sequences that begin with it.
    ("grpc.max_receive_message_length", 64 * 2**20),
)


def parse_arguments(summary: str, *, dtype: str) -> argparse.Namespace:
    """Reads the command line. `dtype`: what the target computes in by default."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="The target's directory.")
    parser.add_argument("--listen", required=True, metavar="unix:PATH", help="Where to serve.")
    parser.add_argument("--vocab-size", type=int, help="Number of token ids; by default what DIR/config.json says.")
    parser.add_argument("--dtype", default=dtype, help="What the target computes in.")
    return parser.parse_args()


def describe(arguments: argparse.Namespace, **own: Any) -> pb.DescribeResponse:
    """Returns the description of a drafter without KV. `own`: the fields that differ between drafters."""
    vocab_size = arguments.vocab_size
    if vocab_size is None:
        vocab_size = json.loads((arguments.tokenizer / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return pb.DescribeResponse(
        role="draft",
        protocol_version=PROTOCOL_VERSION,
        vocab_size=vocab_size,
        tokenizer_sha256=tokenizer_fingerprint(arguments.tokenizer),
        dtype=arguments.dtype,
        pid=os.getpid(),
        **own,
    )


def serve(
    description: pb.DescribeResponse,
    address: str,
    open_epoch: Callable[[pb.AttachRequest, Callable[[], None]], Epoch],
) -> int:
    """Serves until a signal, or until a step fails; returns the exit status.

    `open_epoch` begins an attachment, and calls the function that it is given when a step fails.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Blocked in all threads, so that they wait for `sigwait`.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    broken = threading.Event()

    def fail() -> None:
        broken.set()
        os.kill(os.getpid(), signal.SIGTERM)

    server = grpc.server(ThreadPoolExecutor(8), options=OPTIONS)
    servicer = DraftServicer(description, lambda request: open_epoch(request, fail))
    pb_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    os.umask(0o177)  # other users may not connect to the socket
    server.add_insecure_port(address)
    server.start()
    for name in ("", "slipstream.v1.Worker"):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    logging.info("serving %s at %s", description.model, address)
    signal.sigwait(SIGNALS)
    checks.enter_graceful_shutdown()
    server.stop(0 if broken.is_set() else 1.0).wait()
    return int(broken.is_set())
