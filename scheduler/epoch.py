"""An epoch: verify attached to the memory of its results, and the scheduler's state for it. Drafts arrive and leave."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from slipstream.common.errors import FailedPreconditionError, MismatchError
from slipstream.common.wire.events import StreamName, open_event_log
from slipstream.common.wire.layout import RESULT_FENCES, EpochShape
from slipstream.common.wire.manifest import EVENT
from slipstream.common.wire.step import Role
from slipstream.common.wire.worker import Attachment, Measurements, slot_pages
from slipstream.scheduler.attachment import draft_sizes
from slipstream.scheduler.batch import Batch
from slipstream.scheduler.config import DISPATCH_ACKNOWLEDGED
from slipstream.scheduler.constraints import Constraints
from slipstream.scheduler.draft_choice import DraftChoice
from slipstream.scheduler.link import Dispatch
from slipstream.scheduler.loop import StepLoop
from slipstream.scheduler.observer import DecodeRecord, StepObserver, StepTrace
from slipstream.scheduler.page_log import PageLog
from slipstream.scheduler.result_poller import CPU_LEAD_S, GPU_LEAD_S, ResultPoller
from slipstream.scheduler.results import ResultReader
from slipstream.scheduler.sizes import LARGE_PAUSES
from slipstream.scheduler.speculation import Speculation

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.device.interface import Arena, Device
    from slipstream.common.wire.trace import ClockSample, HostRecords
    from slipstream.common.wire.worker import DraftSizes, WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.constraints import ConstraintsListener
    from slipstream.scheduler.link import Link
    from slipstream.scheduler.metrics import StepMetrics
    from slipstream.scheduler.results import Outgoing
    from slipstream.scheduler.sizes import EpochSizes, Workers
    from slipstream.scheduler.speculation import SpeculationListener
    from slipstream.scheduler.waiting_queue import WaitingQueue


class Epoch:
    """One attachment of verify. `open` it, run its `loop`, `close` it."""

    def __init__(
        self,
        number: int,
        config: SchedulerConfig,
        workers: Workers,
        sizes: EpochSizes,
        *,
        device: Device,
        link: Link,
        queue: WaitingQueue,
        metrics: StepMetrics,
        listener: SpeculationListener,
        grammars: ConstraintsListener | None = None,
        sink: Callable[[Outgoing], None],
    ) -> None:
        """`workers`: verify and the draft that is expected. `link`: verify's, connected, not attached.

        `grammars`: gets what becomes of grammar workers; None where no sequence has a constraint.
        """
        self.number = number
        self.sizes = sizes
        self.verify = workers.verify
        self.link = link
        """Verify's."""
        self.batch = Batch(sizes.batch)
        if config.page_events:
            self.batch.pages.log = PageLog()
        self.fence_kind = device.fence_kind
        self.decodes = DecodeRecord()
        """How drafting did in the last steps."""
        timeout_s = None if config.draft_timeout_ms is None else config.draft_timeout_ms / 1000
        is_on_gpu = device.identity != "cpu"
        num_slots, most = sizes.batch.num_slots, sizes.batch.num_draft_tokens
        self.choice = DraftChoice(num_slots, most, metrics.rested) if config.fixed_draft_tokens is None else None
        """Chooses how many tokens are drafted; None drafts as many as there may be."""
        self._is_acknowledged = config.dispatch == DISPATCH_ACKNOWLEDGED or self.fence_kind == EVENT
        """True if a command is sent once what it waits for is acknowledged."""
        self.speculation = Speculation(
            self.batch,
            listener,
            timeout_s=timeout_s,
            is_on_gpu=is_on_gpu,
            mixes_heads=not self._is_acknowledged,
            choice=self.choice,
        )
        self.log = open_event_log(config.access_log_dir, StreamName.SCHEDULER, number)
        self.constraints: Constraints | None = None
        """None where no sequence has a constraint."""
        if grammars is not None:
            limit_ms, patience = config.grammar_timeout_ms, self.speculation.patience
            self.batch.gate = self.constraints = Constraints(
                self.batch,
                link,
                grammars,
                timeout_s=lambda: patience.timeout_s if limit_ms is None else limit_ms / 1000,
                log=self.log,
            )
        self.trace = StepTrace(self.log)
        """The last steps."""
        self._expected = workers
        self._config = config
        self._device = device
        self._queue = queue
        self._metrics = metrics
        self._sink = sink
        self._shape = EpochShape(
            num_slots=sizes.batch.num_slots,
            run_ahead=sizes.batch.run_ahead,
            num_draft_tokens=sizes.batch.num_draft_tokens,
            chunk_tokens=sizes.batch.chunk_tokens,
        )
        self._held = ExitStack()
        self._held.callback(self.log.close)
        self._running: StepLoop | None = None
        self._observer: StepObserver | None = None
        self.attachment: Attachment
        """Verify's, once the epoch is open."""
        metrics.follow(self.batch, self.log)
        self.measure()

    @property
    def draft(self) -> WorkerDescription | None:
        """The draft that takes part in the steps, or rests."""
        draft = self.speculation.active or self.speculation.resting
        return None if draft is None else draft.attachment.description

    @property
    def num_draft_tokens(self) -> int:
        """K of the draft that takes part; 0 if none does."""
        active = self.speculation.active
        return 0 if active is None else active.num_draft_tokens

    @property
    def algorithm(self) -> str:
        """The draft's algorithm, "none" without a draft."""
        draft = self.draft
        return "none" if draft is None else draft.algorithm

    @property
    def under_mps(self) -> bool:
        """True if all workers share the GPU under MPS."""
        draft = self.draft
        return self.verify.under_mps and (draft is None or draft.under_mps)

    @property
    def labels(self) -> tuple[str, str, str]:
        """Fence, MPS and algorithm, the labels of the step metrics."""
        return self._metrics.labels

    @property
    def last_sent(self) -> int:
        """The last step that was sent; 0 before the first."""
        return 0 if self._running is None else self._running.last_sent

    def open(self) -> StepLoop:
        """Takes the memory and attaches verify. Raises FailedPreconditionError (and its kinds), ConfigError."""
        if self.verify.has_scheduler:
            # Checked before the memory is taken: what a worker may have mapped is not free again at once.
            raise FailedPreconditionError("the verify service has another scheduler")
        arena = self._device.create_arena(self._shape.specs(), RESULT_FENCES, on_host=True)
        self._held.callback(arena.close)
        batch = self.sizes.batch
        self.attachment = Attachment(
            epoch=self.number,
            manifest=arena.manifest,
            shape=self._shape,
            page_tokens=batch.page_tokens,
            num_pages=batch.num_pages,
            slot_pages=slot_pages(self._shape, context_tokens=self.sizes.context_tokens, page_tokens=batch.page_tokens),
            context_tokens=self.sizes.context_tokens,
            expected_draft=self._expected_draft(),
            measures_step_tokens=self._config.max_batched_tokens is None and not self._config.debug,
            longest_pause_ns=10**6 * (self._config.itl_target_ms or 0),
            chooses_draft_tokens=self.choice is not None,
            is_debug=self._config.debug,
        )
        measured = self.link.attach(self.attachment) or Measurements()
        if (step_tokens := measured.step_tokens) is not None:
            is_bounded = self._config.itl_target_ms is not None or not self.verify.memory.total
            large_tokens = None if is_bounded else LARGE_PAUSES * step_tokens.num_tokens
            self.batch.bound_shared_steps(
                step_tokens.num_tokens, step_tokens.doubling_context, large_tokens=large_tokens
            )
        if self.choice is not None:
            self.choice.costs.begin(measured.costs)
        # All processes that need the memory have mapped it by now, but for grammar workers.
        if self.constraints is None:
            arena.seal()
        return self._loop(arena)

    def _expected_draft(self) -> DraftSizes | None:
        draft = self._expected.draft
        if draft is None or self._expected.num_draft_tokens == 0:
            return None
        with suppress(MismatchError):  # it will be refused
            return self.sizes_of(draft, self._expected.num_draft_tokens)
        return None

    def sizes_of(self, draft: WorkerDescription, num_draft_tokens: int | None) -> DraftSizes:
        """The sizes of a draft of this epoch. `num_draft_tokens`: see `DraftTarget`.

        Raises MismatchError for a draft that cannot draft as many tokens as each step is to have.
        """
        row_tokens = min(self.sizes.batch.row_tokens, draft.row_tokens)
        asked = num_draft_tokens or self._config.draft_tokens(row_tokens)
        most = min(asked, draft.max_draft_tokens or asked)
        if asked > most and self._config.fixed_draft_tokens is not None:
            raise MismatchError([f"fixed_draft_tokens: scheduler has {asked}, draft drafts at most {most}"])
        return draft_sizes(draft, most)

    def close(self, *, drain: bool) -> None:
        """Ends verify's stream of commands and gives the memory back; with `drain` it finishes what it has."""
        self.trace.is_closed = True
        if self._observer is not None:
            self._observer.count()
        if not drain and self._running is not None:
            # Verify does it itself too, but its thread may be blocked by the waiting stream, on a GPU in an allocation.
            self.speculation.end(self.last_sent)
            if self.constraints is not None:
                self.constraints.end()
        self.link.detach(drain=drain)
        self.speculation.end(None)
        self._running = None
        self.batch.gate = None  # it refers to the batch, and nothing of an epoch waits for the collector
        self._held.close()

    def read_records(self, role: Role, from_step: int) -> HostRecords | None:
        """A worker's host records of steps from this one on; None if there are none. Called on any thread."""
        draft = self.speculation.active or self.speculation.resting
        if role is Role.VERIFY:
            link, number = self.link, self.number
        elif draft is not None:
            link, number = draft.attachment.link, draft.number
        else:
            return None
        found = link.read_records(from_step)
        return found if found is not None and found.epoch == number else None

    def sample_clock(self) -> ClockSample:
        """Samples the clock of the stamps. Called on any thread. Raises DeadlineExceededError."""
        return self._device.sample_clock()

    def measure(self) -> None:
        """Counts steps under the labels of the draft that takes part now. Called on the loop's thread."""
        mps = "on" if self.under_mps else "off"
        self._metrics.measure(fence=self.fence_kind, mps=mps, algorithm=self.algorithm)

    def _loop(self, arena: Arena) -> StepLoop:
        config, log = self._config, self.log
        lead_s = CPU_LEAD_S if self._device.identity == "cpu" else GPU_LEAD_S
        results = ResultReader(arena, self._shape, log, is_debug=config.debug)
        self._observer = StepObserver(
            self._device, arena, self._shape, log, self._metrics, self.trace, self.decodes, self.choice
        )
        loop = StepLoop(
            self.number,
            step_timeout_s=config.step_timeout_s,
            queue=self._queue,
            batch=self.batch,
            speculation=self.speculation,
            constraints=self.constraints,
            dispatch=self._dispatch(),
            results=results,
            poller=ResultPoller(results.ended_ns, lead_s),
            observer=self._observer,
            sink=self._sink,
        )
        self._running = loop
        return loop

    def _dispatch(self) -> Dispatch:
        if not self._is_acknowledged:
            return Dispatch(self.link, self.log)
        speculation, timeout_s = self.speculation, self._config.step_timeout_s
        return Dispatch(
            self.link, self.log, lambda role: timeout_s if role is Role.VERIFY else speculation.acknowledge_timeout_s
        )
