"""An epoch: the workers attached to one arena, and the scheduler's state for it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.common.device.manifest import DTYPES, EVENT
from slipstream.common.errors import FailedPreconditionError
from slipstream.common.worker.access_log import AccessLog, JsonLinesAccessLog, StreamName
from slipstream.common.worker.contract import Attachment
from slipstream.common.worker.layout import FutureMapShape
from slipstream.common.worker.step import FenceName, Role
from slipstream.scheduler.config import DISPATCH_ACKNOWLEDGED
from slipstream.scheduler.core.batch import Batch
from slipstream.scheduler.core.loop import LoopSettings, StepLoop
from slipstream.scheduler.core.plan import DraftTraits
from slipstream.scheduler.core.results import ResultReader
from slipstream.scheduler.telemetry.timings import StepRecorder, StepTimings
from slipstream.scheduler.workers.link import DispatchAcknowledged, DispatchTogether

if TYPE_CHECKING:
    from slipstream.common.device.interface import Arena, ClockSample, Device
    from slipstream.common.worker.trace import HostRecords
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.core.outbox import OutputSink
    from slipstream.scheduler.core.waiting_queue import WaitingQueue
    from slipstream.scheduler.telemetry.step_metrics import StepMetrics
    from slipstream.scheduler.workers.link import Dispatch, Link
    from slipstream.scheduler.workers.sizing import EpochSizes, Workers


class Epoch:
    """One attachment of the workers. `open` it, run its `loop`, `close` it."""

    def __init__(
        self,
        number: int,
        config: SchedulerConfig,
        workers: Workers,
        sizes: EpochSizes,
        *,
        device: Device,
        links: dict[Role, Link],
        queue: WaitingQueue,
        metrics: StepMetrics,
        sink: OutputSink,
    ) -> None:
        """`links`: connected, not attached."""
        self.number = number
        self.sizes = sizes
        self.workers = workers
        self.batch = Batch(sizes.batch)
        self.fence_kind = device.fence_kind
        self.labels = metrics.labels
        """Fence, MPS and algorithm, the labels of the step metrics."""
        self.recorder = StepRecorder()
        """Records of the last steps."""
        self._config = config
        self._device = device
        self._links = links
        self._queue = queue
        self._metrics = metrics
        self._sink = sink
        self._shape = FutureMapShape(
            num_slots=sizes.batch.num_slots,
            run_ahead=config.run_ahead,
            num_draft_tokens=sizes.batch.num_draft_tokens,
            chunk_tokens=sizes.batch.chunk_tokens,
            hidden_width=workers.hidden_width,
            hidden_dtype=DTYPES[workers.verify.dtype],
        )
        self._held = ExitStack()
        self._running: tuple[Arena, StepLoop, AccessLog] | None = None

    def open(self) -> StepLoop:
        """Lays out the arena and attaches the workers. Raises FailedPreconditionError (and its kinds), ConfigError."""
        self._check_free()
        verify, draft = self.workers.verify, self.workers.draft
        arena = self._device.create_arena(self._shape.specs(), list(FenceName))
        self._held.callback(arena.close)
        attachment = Attachment(
            epoch=self.number,
            manifest=arena.manifest,
            shape=self._shape,
            page_tokens=self.sizes.batch.page_tokens,
            num_pages=self.sizes.batch.num_pages,
            context_tokens=self.sizes.context_tokens,
            is_debug=self._config.debug,
        )
        peers = {Role.VERIFY: draft, Role.DRAFT: verify}
        for role, link in self._links.items():
            link.attach(replace(attachment, peer=peers[role]))
        # All processes that need the memory have mapped it by now.
        arena.seal()
        return self._loop(arena)

    def _check_free(self) -> None:
        """Checked before the arena is allocated: memory that a worker may have mapped is not free again at once."""
        for worker in self.workers.all:
            if worker.has_scheduler:
                raise FailedPreconditionError(f"the {worker.role.value} service has another scheduler")

    def close(self, *, drain: bool) -> None:
        """Ends the streams of commands and gives the memory back; with `drain` the workers finish what they have."""
        self.recorder.close()
        if not drain:
            self._release_workers()
        for link in self._links.values():
            link.detach(drain=drain)
        self._held.close()

    def read_records(self, role: Role, from_step: int) -> HostRecords | None:
        """A worker's host records of steps from this one on; None if there are none. Called on any thread."""
        found = self._links[role].read_records(from_step)
        return found if found is not None and found.epoch == self.number else None

    def sample_clock(self) -> ClockSample:
        """Samples the clock of the stamps. Called on any thread. Raises DeadlineExceededError."""
        return self._device.sample_clock()

    def _release_workers(self) -> None:
        """Releases the workers' waits: the signal may never come.

        The workers do it themselves too, but their thread may be blocked by the waiting stream: on a GPU, in an
        allocation.
        """
        if self._running is None:
            return
        arena, loop, log = self._running
        for name in FenceName:
            arena.fence(name).release(loop.last_sent)
            if log.is_enabled:
                log.release(name, loop.last_sent, epoch=self.number)

    def _loop(self, arena: Arena) -> StepLoop:
        config, log = self._config, self._access_log()
        settings = LoopSettings(
            epoch=self.number,
            run_ahead=config.run_ahead,
            draft=DraftTraits(self.workers.draft is not None, reads_hidden=self._shape.hidden_width > 0),
            ring=self._shape.ring,
            step_timeout_s=config.step_timeout_s,
        )
        results = ResultReader(self._device, arena, self._shape, log)
        self._held.callback(results.close)
        loop = StepLoop(
            settings,
            queue=self._queue,
            batch=self.batch,
            links=self._links,
            dispatch=self._dispatch(),
            results=results,
            timings=StepTimings(self._device, arena, self._shape, log, self._metrics.observe, self.recorder),
            metrics=self._metrics,
            recorder=self.recorder,
            draft_done=arena.fence(FenceName.DRAFT_DONE),
            log=log,
            sink=self._sink,
        )
        self._running = (arena, loop, log)
        return loop

    def _dispatch(self) -> Dispatch:
        if self._config.dispatch == DISPATCH_ACKNOWLEDGED or self.fence_kind == EVENT:
            return DispatchAcknowledged(self._links, self._metrics, self._config.step_timeout_s)
        return DispatchTogether()

    def _access_log(self) -> AccessLog:
        directory = self._config.access_log_dir
        if directory is None:
            return AccessLog()
        log = JsonLinesAccessLog(directory / f"scheduler-{self.number}-{time.time_ns()}.jsonl", StreamName.SCHEDULER)
        self._held.callback(log.close)
        return log
