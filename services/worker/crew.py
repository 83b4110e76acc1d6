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
import time
import weakref
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import torch

from slipstream.common.device.choose import CPU, cuda_obstacle
from slipstream.common.errors import CheckpointError, ConfigError, OutOfMemoryError, UnavailableError
from slipstream.common.settings import arguments
from slipstream.common.wire.events import Event, Site
from slipstream.common.wire.trace import TracedProcess
from slipstream.services.models.config import ModelConfig, Rank
from slipstream.services.models.ranks import Ranks, file_store
from slipstream.services.models.sharding import sharded
from slipstream.services.worker.rank_metrics import RankReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from slipstream.common.errors import SlipstreamError
    from slipstream.common.rpc.service_options import LogSettings
    from slipstream.services.models.ranks import Channel, Message
    from slipstream.services.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 10.0
"""Longest time between two signs of life of a rank."""
REPORT_TIMEOUT_S = 2.0
"""Longest time for the others to answer what they did; a trace goes without those that do not."""
END_TIMEOUT_S = 5.0
"""Longest time for all ranks to end by themselves when rank 0 hangs up."""
PROGRAM = (sys.executable, "-m", "slipstream.services.rank_main")
"""The command that starts a rank, before its options."""
_RECEIVED_BYTES = 2**16
_LOADING_ERRORS: Mapping[str, type[SlipstreamError]] = MappingProxyType(
    {kind.__name__: kind for kind in (CheckpointError, OutOfMemoryError)}
)


class Member:
    """A rank after the first, as rank 0 knows it."""

    def __init__(self, rank: int, connection: socket.socket, pid: int | None) -> None:
        self.rank = rank
        self.connection = connection
        self.pid = pid
        self.is_loaded = False
        self.answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.said: Message = {"free": 0, "waited_s": None}
        """Its last message; `free`: bytes of its device's memory, 0 where this is the host's."""
        self.asked: dict[int, Future[list[list[int]]]] = {}
        """The records that it is asked for, by the question's number."""
        # Made here: the connection may be closed before the thread runs that reads.
        self._received = connection.makefile("rb", buffering=0)
        self._rest = b""

    def report(self) -> RankReport:
        """Describes it by its last message."""
        measured = {"free_bytes": self.said["free"], "waited_s": self.said["waited_s"]}
        return RankReport(rank=self.rank, pid=self.pid, is_loaded=self.is_loaded, **measured)

    def watch(self, lose: Callable[[int, str], None]) -> None:
        """Takes its messages until it ends, or hangs."""
        ready = select.poll()
        ready.register(self._received, select.POLLIN)
        patience_ms: float | None = None  # until it has loaded what shows signs of life
        with self._received:
            while ready.poll(patience_ms):
                try:
                    some = self._received.read(_RECEIVED_BYTES)
                except ConnectionResetError:  # it has not read all that it was told
                    some = b""
                if not some:
                    return lose(self.rank, "has ended")
                patience_ms = 1e3 * HANG_TIMEOUT_S
                # All lines that are there: `poll` does not return for what was received.
                *lines, self._rest = (self._rest + some).split(b"\n")
                for message in map(json.loads, lines):
                    if "records" in message and (asked := self.asked.pop(message["number"], None)) is not None:
                        asked.set_result(message.pop("records"))
                    self.said = message
                    if "error" in message:
                        self.is_loaded |= not message["error"]
                        self.answers.put(message)
        return lose(self.rank, f"has shown no sign of life for {HANG_TIMEOUT_S:g} s")


class Crew:
    """Implements `Channel`: rank 0's ends of the connections with the others."""

    def __init__(
        self,
        connections: Sequence[socket.socket],
        store: int,
        lose: Callable[[int, str], None],
        pids: Sequence[int] = (),
    ) -> None:
        """`store`: descriptor of the file by which ranks meet. `lose` is called with a rank and what became of it.

        `pids`: of the others' processes, if they have any.
        """
        self._store = store
        self._lose = lose
        self._own: Callable[[], Ranks | None] = lambda: None
        """Rank 0's collectives, where they are measured. They refer to this: a cycle would keep their store open."""
        self._telling = threading.Lock()
        """Held for a message: steps tell on one thread, a question for records comes from another."""
        numbered = enumerate(zip_longest(connections, pids), 1)
        self._members = [Member(rank, connection, pid) for rank, (connection, pid) in numbered]
        self._is_loaded = self._is_closing = False
        for member in self._members:
            threading.Thread(target=member.watch, args=(self._report,), name=f"rank-{member.rank}", daemon=True).start()

    def __len__(self) -> int:
        """The number of ranks, this one included."""
        return len(self._members) + 1

    @property
    def least_free(self) -> int | None:
        """Bytes that are free on the device with the fewest; None where the memory is the host's."""
        return min(filter(None, (member.said["free"] for member in self._members)), default=None)

    def tell(self, message: Message) -> None:
        """See `Channel.tell`. Nothing happens where a rank is gone: who watches it ends this process."""
        line = json.dumps(message).encode() + b"\n"
        with self._telling:
            for member in self._members:
                with suppress(OSError):
                    member.connection.sendall(line)

    def answers(self) -> list[Message]:
        return [member.answers.get() for member in self._members]

    def meet(self, device: torch.device) -> Ranks:
        """Makes rank 0's collectives."""
        ranks = join_ranks(Rank(0, len(self)), self._store, device, self)
        if device.type == "cpu":
            self._own = weakref.ref(ranks)
        return ranks

    def reports(self) -> list[RankReport]:
        """Describes all ranks; those after the first by their last messages."""
        waited_s = None if (own := self._own()) is None else own.waited_s
        first = RankReport(rank=0, pid=os.getpid(), is_loaded=self._is_loaded, waited_s=waited_s)
        return [first, *(member.report() for member in self._members)]

    def read_records(self, from_step: int) -> tuple[TracedProcess, ...]:
        """Asks the others for their work in steps from this one on. Blocks until they have done what they were told."""
        number = time.monotonic_ns()
        asked: dict[Member, Future[list[list[int]]]] = {member: Future() for member in self._members}
        for member, future in asked.items():
            member.asked[number] = future
        self.tell({"do": "report", "number": number, "from_step": from_step})
        wait(asked.values(), REPORT_TIMEOUT_S)
        return tuple(
            TracedProcess(
                name=f"rank {member.rank}",
                pid=member.pid or 0,
                records=tuple(Event(Site(site), *record) for site, *record in future.result()),
            )
            for member, future in asked.items()
            if future.done()
        )

    def wait_until_loaded(self) -> None:
        """Returns once each other rank has its part, as rank 0 has. Raises CheckpointError, OutOfMemoryError."""
        self._is_loaded = True
        for answer in self.answers():
            if answer["error"]:
                raise _LOADING_ERRORS.get(answer["kind"], UnavailableError)(answer["error"])

    def close(self) -> None:
        """Hangs up; the others then end."""
        self._is_closing = True
        for member in self._members:
            with suppress(OSError):
                member.connection.shutdown(socket.SHUT_WR)

    def _report(self, rank: int, reason: str) -> None:
        if not self._is_closing:
            self._lose(rank, reason)


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
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as held:
        store = os.memfd_create("slipstream-ranks")
        held.callback(os.close, store)
        held.callback(_end, processes)
        connections = []
        for rank in range(1, config.tensor_parallel_size):
            own, theirs = map(held.enter_context, socket.socketpair())
            with theirs:
                processes.append(_start(rank, config, logs, store, theirs.fileno()))
            connections.append(own)
        crew = Crew(connections, store, end_with_it, [process.pid for process in processes])
        held.callback(crew.close)
        yield crew


def _start(rank: int, config: WorkerConfig, logs: LogSettings, store: int, connection: int) -> subprocess.Popen[bytes]:
    place = {"rank": rank, "store": store, "connection": connection, "parent": os.getpid()}
    log = {"log-level": logs.log_level, "log-format": logs.log_format}
    options = [f"--{name}={value}" for name, value in (*place.items(), *log.items())]
    # Ctrl-C in a terminal is for rank 0.
    return subprocess.Popen(
        [*PROGRAM, *options, *arguments(config)], pass_fds=[store, connection], start_new_session=True
    )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Waits for ranks that were hung up on, together for END_TIMEOUT_S, and kills those that remain."""
    end_at = time.monotonic() + END_TIMEOUT_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end_at - time.monotonic()))
    for process in processes:
        process.kill()
        process.wait()
