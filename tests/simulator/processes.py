"""The processes under test: a scheduler and a gateway of the real parts, on the simulated world."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from slipstream.common.errors import SlipstreamError
from slipstream.common.wire.server import (
    DraftSwap,
    SchedulerDescription,
    SchedulerState,
    ServerState,
    SwapOutcome,
    SwapTerms,
)
from slipstream.common.wire.step import Role, RowTokens
from slipstream.gateway.config import WHOLE
from slipstream.gateway.job import JobStore
from slipstream.gateway.jobs import JobManager
from slipstream.gateway.journal_file import Change, JournalFile, JournalMode
from slipstream.gateway.metrics import RequestMetrics
from slipstream.gateway.model import ServedModel
from slipstream.gateway.peers import Peers
from slipstream.gateway.request import RequestLimits
from slipstream.gateway.scheduler import SchedulerLink
from slipstream.gateway.service import GenerationServicer
from slipstream.gateway.stream import StreamWrites
from slipstream.gateway.tokenize_queue import TokenizeQueue
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.epoch import Epoch
from slipstream.scheduler.results import Outgoing
from slipstream.scheduler.service import SchedulerServicer
from slipstream.scheduler.session import WorkerSession
from slipstream.scheduler.waiting_queue import WaitingQueue
from tests.harness.tokenizers_by_kind import make_tokenizer
from tests.harness.workers import VOCAB_SIZE
from tests.simulator.event_loop import SimulatedLoop
from tests.simulator.links import SimulatedLink
from tests.simulator.memory import Host, SimulatedDevice
from tests.simulator.threads import SimulatedThread
from tests.simulator.transport import SimulatedConnection
from tests.simulator.workers import SimulatedWorker
from tests.simulator.world import Process, World

EOS_ID = 1
"""Never said by the model."""
RETURN_S = 2.0
"""Clients may take so long to come back to a gateway that was started again."""


class SchedulerProcess(Process):
    """The real session, loop, batch, queue and servicer. Implements `SessionListener`."""

    def __init__(
        self,
        world: World,
        host: Host,
        config: SchedulerConfig,
        find: Callable[[str], SimulatedWorker | None],
        fence_kind: str,
    ) -> None:
        super().__init__(world, "scheduler")
        self.loop = SimulatedLoop(self)
        self.config = config
        self.servicer: SchedulerServicer | None = None
        self.epoch: Epoch | None = None
        """The epoch that is served."""
        self.on_verify_lost: Callable[[str], None] = lambda _: None
        self._find = find
        self._device = SimulatedDevice(host, self, fence_kind)
        self.soon(self.loop.run_call, self._start)

    def _start(self) -> None:
        self.queue = WaitingQueue(self.config.max_sequences)
        self.servicer = SchedulerServicer(self.queue, self.describe, self.swap)
        self.session = WorkerSession(
            self.config,
            cast("Any", self._device),
            self.queue,
            registry=CollectorRegistry(),
            listener=self,
            sink=self.put,
            make_link=self._link,
        )
        self.session.start()

    def _link(self, role: Role, address: str) -> Any:
        return SimulatedLink(self, role, lambda: self._find(address), on_failure=self.queue.wake)

    def begin_swap(self, name: str) -> None:
        """Swaps the draft on a thread of its own."""
        if self.servicer is None:
            return
        terms = SwapTerms(
            num_draft_tokens=self.world.random.randint(1, self.config.draft_tokens(RowTokens.WHOLE)),
            judge_steps=self.world.random.choice((0, 3, 10)),
        )
        request = DraftSwap(address="" if name == "none" else f"unix:/{name}", terms=terms)

        def run() -> None:
            try:
                outcome = self.swap(request)
            except SlipstreamError as error:
                self.world.note("swap:", error)
            else:
                self.world.note("swap:", outcome.reason or "done")

        SimulatedThread(self.world, run, name="swap").start()

    def swap(self, request: DraftSwap) -> SwapOutcome:
        """Swaps the draft; blocks a thread."""
        return self.session.drafts.swap(request)

    def put(self, outgoing: Outgoing) -> None:
        """See `StepLoop`."""
        assert self.servicer is not None
        self.world.may_be_interrupted()
        self.servicer.put(outgoing)
        self.world.may_be_interrupted()

    def attached(self, epoch: Epoch) -> None:
        """See `SessionListener.attached`."""
        self.epoch = epoch
        self._change(SchedulerState(serving=self.describe()))

    def detached(self, reason: str) -> None:
        """See `SessionListener.detached`."""
        self.epoch = None
        self.on_verify_lost(reason)
        self._change(SchedulerState(paused=reason))

    def failed(self, error: SlipstreamError) -> None:
        """See `SessionListener.failed`."""
        if self.is_alive:
            self.world.fail(f"the scheduler gave up: {error!r}")

    def _change(self, state: SchedulerState) -> None:
        assert self.servicer is not None
        self.world.note("scheduler:", f"epoch {state.serving.server.epoch}" if state.serving else state.paused)
        self.world.may_be_interrupted()
        self.loop.call_soon_threadsafe(self.servicer.set_state, state)

    def describe(self) -> SchedulerDescription:
        """What the epoch serves."""
        assert self.epoch is not None
        sizes = self.epoch.sizes
        server = ServerState(
            version="1",
            model="checksum",
            vocab_size=VOCAB_SIZE,
            context_tokens=sizes.context_tokens,
            algorithm="standalone",
            num_draft_tokens=sizes.batch.num_draft_tokens,
            run_ahead=sizes.batch.run_ahead,
            num_slots=self.epoch.batch.slots.num_slots,
            page_tokens=sizes.batch.page_tokens,
            num_pages=self.epoch.batch.pages.num_pages,
            num_free_pages=self.epoch.batch.pages.num_free,
            queue_capacity=self.queue.capacity,
            num_waiting=len(self.queue),
            num_running=self.epoch.batch.num_running,
            epoch=self.epoch.number,
            services=(),
            fence="timeline",
        )
        return SchedulerDescription(
            server=server,
            tokenizer_path="/nowhere",
            eos_token_ids=(EOS_ID,),
            max_sequences=self.queue.capacity,
            most_draft_tokens=sizes.batch.num_draft_tokens,
            constraints=self.config.grammar is not None,
        )


@lru_cache
def _tokenizer() -> Any:
    return make_tokenizer("byte level")


@lru_cache
def _metrics() -> RequestMetrics:
    return RequestMetrics(CollectorRegistry(), num_running=lambda: 0, num_waiting=lambda: 0)


@lru_cache
def _model(context_tokens: int) -> ServedModel:
    limits = RequestLimits(
        vocab_size=VOCAB_SIZE, context_tokens=context_tokens, eos_token_ids=frozenset({EOS_ID}), num_draft_tokens=16
    )
    return ServedModel(_tokenizer(), limits, identity="checksum")


class _Alone:
    """The peers of a gateway that is alone."""

    shard = WHOLE


class GatewayProcess(Process):
    """The real manager, journal, scheduler link and servicer."""

    def __init__(
        self,
        world: World,
        journal: Path,
        find: Callable[[], SchedulerProcess | None],
        *,
        queue: int,
        outage_timeout_s: float,
    ) -> None:
        super().__init__(world, "gateway")
        self.is_full_until = 0.0
        """The disk of the journal has no room until then."""
        self.loop = SimulatedLoop(self)
        self.servicer: GenerationServicer | None = None
        """None until it listens."""
        self._file = JournalFile.open(journal, JournalMode.PROCESS)
        self.unwind.append(self._file.close)
        self._commit = self._file.commit
        self._file.commit = self._commit_if_there_is_room  # type: ignore[method-assign]
        self.connection = SimulatedConnection(self, find)
        self.soon(self.loop.run_call, self._start, queue, outage_timeout_s)

    def _commit_if_there_is_room(self, changes: Sequence[Change], rows: Sequence[bytes]) -> int:
        if self.world.now < self.is_full_until:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._commit(changes, rows)

    def _start(self, queue: int, outage_timeout_s: float) -> None:
        self.link = SchedulerLink(
            "simulated",
            lambda description, _: _model(description.server.context_tokens),
            capacity=queue,
            outage_timeout_s=outage_timeout_s,
            # No sequence is to blame for an epoch's end here.
            max_lost_epochs=1000,
            connect=lambda _: self.connection,  # type: ignore[arg-type,return-value]
        )
        store = JobStore(capacity=1000, ttl_s=1000.0, clock=self.world.monotonic)
        self.manager = JobManager(self.link, store, _metrics(), journal_file=self._file, return_s=RETURN_S)
        self.servicer = GenerationServicer(
            self.manager,
            model=self.link.model,
            state=None,  # type: ignore[arg-type]  # clients of the simulation ask for none
            turns=TokenizeQueue(None),  # type: ignore[arg-type]  # nor for text to be tokenised
            grammars=None,  # type: ignore[arg-type]  # nor for a constraint
            peers=cast("Peers", _Alone()),
            writes=StreamWrites(60.0, lambda: None),
        )
        self.loop.create_task(self.link.run(self.manager))


class Machine:
    """All processes of one server, and what starts them again."""

    def __init__(
        self,
        world: World,
        host: Host,
        make: dict[str, Callable[[], Process]],
    ) -> None:
        self.world = world
        self.host = host
        self._make = make
        self.now: dict[str, Process] = {}
        """The last process of each name, dead or alive."""
        self.all: list[Process] = []

    def start(self, name: str) -> None:
        """Starts a process unless it runs."""
        if name not in self.now or not self.now[name].is_alive:
            process = self.now[name] = self._make[name]()
            self.all.append(process)
            self.world.note("started", name)
            process.on_lost.append(lambda: self._lost(process))

    def find(self, name: str) -> Any:
        """The process that listens at an address now, or None."""
        process = self.now.get(name)
        return process if process is not None and process.is_alive else None

    def _lost(self, process: Process) -> None:
        if process.is_alive:
            # It was stopped for too long, and has lost its connections alone.
            process.on_lost.append(lambda: self._lost(process))
        else:
            restart_s = self.world.random.choice((0.0, 0.01, 0.3)) * self.world.random.random()
            self.world.at(restart_s, self.start, process.name)
