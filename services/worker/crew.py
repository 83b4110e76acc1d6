"""The processes of a target's other ranks: children of rank 0, which live as long as it, and it no longer than they.

A rank that ends, or shows no sign of life for `HANG_TIMEOUT_S`, ends rank 0 at once, and with it all others: the kernel
kills them. So no process waits in a collective for one that is gone, and the worker is started again as a whole.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import torch

from slipstream.common.device.choose import CPU, cuda_obstacle
from slipstream.common.errors import CheckpointError, ConfigError, OutOfMemoryError, UnavailableError
from slipstream.common.settings import arguments
from slipstream.services.models.config import ModelConfig, Rank
from slipstream.services.models.ranks import Ranks, file_store
from slipstream.services.models.sharding import sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from slipstream.common.errors import SlipstreamError
    from slipstream.common.rpc.service_options import LogSettings
    from slipstream.services.models.ranks import Channel, Message
    from slipstream.services.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 10.0
"""Longest time between two signs of life of a rank."""
END_TIMEOUT_S = 5.0
"""Longest time for a rank to end by itself when rank 0 hangs up."""
_RECEIVED_BYTES = 2**16
_LOADING_ERRORS: Mapping[str, type[SlipstreamError]] = MappingProxyType(
    {kind.__name__: kind for kind in (CheckpointError, OutOfMemoryError)}
)


class Crew:
    """Implements `Channel`: rank 0's ends of the connections with the others."""

    def __init__(self, connections: list[socket.socket], store: int, lose: Callable[[int, str], None]) -> None:
        """`store`: descriptor of the file by which ranks meet. `lose` is called with a rank and what became of it."""
        self._store = store
        self._connections = connections
        self._lose = lose
        self._free: dict[int, int] = {}
        """Bytes that each rank's device had free by its last message; 0 where these are the host's."""
        self._answers: list[queue.SimpleQueue[Message]] = [queue.SimpleQueue() for _ in connections]
        self._is_closing = False
        for rank in range(1, len(connections) + 1):
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def __len__(self) -> int:
        """The number of ranks, this one included."""
        return len(self._connections) + 1

    @property
    def least_free(self) -> int | None:
        """Bytes that are free on the device with the fewest; None where the memory is the host's."""
        return min(filter(None, self._free.values()), default=None)

    def tell(self, message: Message) -> None:
        """See `Channel.tell`. Nothing happens where a rank is gone: who watches it ends this process."""
        line = json.dumps(message).encode() + b"\n"
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(line)

    def answers(self) -> list[Message]:
        return [answers.get() for answers in self._answers]

    def meet(self, device: torch.device) -> Ranks:
        """Makes rank 0's collectives."""
        return join_ranks(Rank(0, len(self)), self._store, device, self)

    def wait_until_loaded(self) -> None:
        """Returns once each rank has its part of the model. Raises CheckpointError, OutOfMemoryError."""
        for answer in self.answers():
            if answer["error"]:
                raise _LOADING_ERRORS.get(answer["kind"], UnavailableError)(answer["error"])

    def close(self) -> None:
        """Hangs up; the others then end."""
        self._is_closing = True
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _watch(self, rank: int) -> None:
        connection, answers, rest = self._connections[rank - 1], self._answers[rank - 1], b""
        ready = select.poll()
        ready.register(connection, select.POLLIN)
        patience_ms: float | None = None  # until it has loaded what shows signs of life
        with connection.makefile("rb", buffering=0) as received:
            while True:
                if not ready.poll(patience_ms):
                    return self._lose(rank, f"has shown no sign of life for {HANG_TIMEOUT_S:g} s")
                try:
                    some = received.read(_RECEIVED_BYTES)
                except ConnectionResetError:  # it has not read all that it was told
                    some = b""
                if not some:
                    return None if self._is_closing else self._lose(rank, "has ended")
                patience_ms = 1e3 * HANG_TIMEOUT_S
                # All lines that are there: `poll` does not return for what was received.
                *lines, rest = (rest + some).split(b"\n")
                for message in map(json.loads, lines):
                    self._free[rank] = message["free"]
                    if "error" in message:
                        answers.put(message)


def end_with_it(rank: int, reason: str) -> NoReturn:
    """Ends this process, whose work needs the rank."""
    logger.error("rank %d of the target %s: all ranks end at once, and must be started again", rank, reason)
    logging.shutdown()
    os._exit(1)


def join_ranks(rank: Rank, store: int, device: torch.device, channel: Channel | None = None) -> Ranks:
    """Makes a rank's collectives. `store`: see `Crew`; `channel`: rank 0's."""
    meeting = file_store(store, rank.size)
    if device.type == "cpu":
        return Ranks(rank, meeting, channel)
    # Imported here, as a build of PyTorch without CUDA lacks what it needs.
    from slipstream.services.models.cuda_ranks import CudaRanks

    return CudaRanks(rank, meeting, device, channel)


def _check(config: WorkerConfig) -> None:
    number = config.tensor_parallel_size
    sharded(ModelConfig.from_directory(config.directory), Rank(0, number))
    if config.device != CPU and cuda_obstacle() is None and (there := torch.cuda.device_count()) < number:
        raise ConfigError("tensor_parallel_size", number, f"at most {there}, the GPUs that are visible here")


@contextmanager
def started_crew(config: WorkerConfig, logs: LogSettings) -> Iterator[Crew | None]:
    """Starts the other ranks, and ends them; None for a target of one. Called on the main thread, with which they die.

    Raises ConfigError for a target that cannot be divided so, and for fewer GPUs; CheckpointError.

    `logs`: how they log; what they write goes where this process's output goes.
    """
    if config.tensor_parallel_size == 1:
        yield None
        return
    _check(config)
    store, connections, processes = os.memfd_create("slipstream-ranks"), [], []
    for rank in range(1, config.tensor_parallel_size):
        own, theirs = socket.socketpair()
        rest = ["--rank", str(rank), "--store", str(store), "--connection", str(theirs.fileno())]
        options = [*rest, "--parent", str(os.getpid()), *arguments(config)]
        options += ["--log-level", logs.log_level, "--log-format", logs.log_format]
        command = [sys.executable, "-m", "slipstream.services.rank_main", *options]
        # Ctrl-C in a terminal is for rank 0.
        processes.append(subprocess.Popen(command, pass_fds=[store, theirs.fileno()], start_new_session=True))
        theirs.close()
        connections.append(own)
    crew = Crew(connections, store, end_with_it)
    try:
        yield crew
    finally:
        crew.close()
        os.close(store)
        for process in processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
