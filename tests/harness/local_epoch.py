"""A scheduler's epoch over workers in this process: everything is real but gRPC."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from prometheus_client import CollectorRegistry

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.step import FenceName, FenceOps, Role, StepCommand
from slipstream.scheduler.attachment import DraftAttachment
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.draft import Draft
from slipstream.scheduler.epoch import Epoch
from slipstream.scheduler.link import Link
from slipstream.scheduler.loop import StepLoop
from slipstream.scheduler.metrics import StepMetrics, StepTiming
from slipstream.scheduler.records import LossCause
from slipstream.scheduler.results import Outgoing
from slipstream.scheduler.sizes import EpochSizes, Workers
from slipstream.scheduler.waiting_queue import WaitingQueue
from slipstream.services.worker.engine import RoleEngine
from tests.harness.counted_jobs import Job, JobBook, OutputRow
from tests.harness.workers import LocalWorker, local_workers

PATIENCE_MS = 20_000.0
"""For drafts on a machine that is busy with something else."""


class RecordingMetrics(StepMetrics):
    """Keeps the time of each step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.timings: list[StepTiming] = []

    def observe(self, take_apart: Callable[[], StepTiming]) -> None:
        """Keeps it, too."""
        self.timings.append(take_apart())
        super().observe(take_apart)


class LocalEpoch:
    """Runs jobs to their end."""

    def __init__(
        self,
        number: int,
        config: SchedulerConfig,
        workers: abc.Sequence[LocalWorker],
        *,
        device: Device | None = None,
        num_pages: int | None = None,
    ) -> None:
        """`device`: the workers'; None is the CPU. `num_pages`: in place of those that the configuration brings.

        A configuration that does not bound a draft's time gets PATIENCE_MS.
        """
        if config.draft_timeout_ms is None:
            config = replace(config, draft_timeout_ms=PATIENCE_MS)
        self._links = {worker.role: cast("Link", worker) for worker in workers}
        draft = self._links.get(Role.DRAFT)
        verify = self._links[Role.VERIFY].describe()
        described = Workers(verify=verify, draft=None if draft is None else draft.describe())
        self._device = device or HostDevice()
        self.attachments: list[DraftAttachment] = []
        self.registry = CollectorRegistry()
        self.metrics = RecordingMetrics(self.registry)
        self.queue = WaitingQueue(config.max_sequences)
        self.queue.open(number)
        self.jobs = JobBook(self.queue)
        self.outputs = self.jobs.outputs
        self.events: list[tuple[str, int]] = []
        """What became of attachments, by their numbers."""
        self._to_come: list[abc.Sequence[Job]] = []
        self.on_progress: Callable[[Job, OutputRow], None] = lambda job, row: None
        """Called on the loop's thread."""
        self.on_open: Callable[[], None] = lambda: None
        """Called by `run` before the first step."""
        sizes = EpochSizes.decide(config, described)
        if num_pages is not None:
            sizes = replace(sizes, batch=replace(sizes.batch, num_pages=num_pages))
        self.epoch = Epoch(
            number,
            config,
            described,
            sizes,
            device=self._device,
            link=self._links[Role.VERIFY],
            queue=self.queue,
            metrics=self.metrics,
            listener=self,
            sink=self.put,
        )

    @contextmanager
    def loop(self) -> Iterator[StepLoop]:
        """The open epoch's loop."""
        try:
            yield self.open()
        finally:
            self.close(drain=True)

    def open(self) -> StepLoop:
        """Opens the epoch, and has the draft, if there is one, take part from the first step on."""
        loop = self.epoch.open()
        if Role.DRAFT in self._links:
            self.epoch.speculation.offer(self.attach(self._links[Role.DRAFT]))
            self.epoch.speculation.settle()
        return loop

    def attach(self, link: Link, num_draft_tokens: int | None = None) -> Draft:
        """Attaches a draft beside the running steps; to be offered then."""
        epoch, description = self.epoch, link.describe()
        number = max(epoch.number, description.last_epoch, *(one.number for one in self.attachments), 0) + 1
        shape = epoch.sizes_of(description, num_draft_tokens).shape(epoch.attachment.shape, epoch.verify.torch_dtype)
        attachment = DraftAttachment(number, link, description, shape, self._device, epoch=epoch.number, log=epoch.log)
        attachment.attach(epoch.attachment, epoch.link, epoch.verify)
        self.attachments.append(attachment)
        return Draft(attachment)

    def close(self, *, drain: bool) -> None:
        """Ends the epoch and all attachments."""
        last_sent = self.epoch.last_sent
        self.epoch.close(drain=drain)
        for attachment in self.attachments:
            if not drain:
                attachment.release_draft(last_sent)
            attachment.detach(None, drain=drain)
            attachment.close()

    def joined(self, draft: Draft, catch_up_s: float) -> None:
        """See `SpeculationListener.joined`."""
        self.epoch.measure()
        self.events.append(("joined", draft.number))

    def left(self, draft: Draft, cause: LossCause, reason: str) -> None:
        """See `SpeculationListener.left`."""
        self.epoch.measure()
        self.events.append((cause.value, draft.number))

    def gone(self, draft: Draft) -> None:
        """See `SpeculationListener.gone`."""
        self.events.append(("gone", draft.number))

    def run(self, *waves: abc.Sequence[Job]) -> dict[Job, list[int]]:
        """Runs each wave of jobs when the last one is over; returns the tokens of each."""
        self._to_come = list(waves)
        self._next_wave()
        with self.loop() as loop:
            self.on_open()
            loop.run()
            loop.finish()
        return self.outputs

    def finish_reason(self, job: Job) -> FinishReason:
        """Why the job ended."""
        return self.jobs.ends[job]

    def _next_wave(self) -> None:
        if not self._to_come:
            self.queue.stop()
            return
        self.jobs.add(*self._to_come.pop(0))

    def put(self, outgoing: Outgoing) -> None:
        """See `StepLoop`."""
        assert outgoing, "nothing is put without need"
        for job, row in self.jobs.take(outgoing):
            self.on_progress(job, row)
        if len(self.jobs.ends) + len(self.jobs.refused) == len(self.outputs):
            self._next_wave()


@dataclass(frozen=True)
class Models:
    """Both sides of a step, loaded once."""

    verify: RoleEngine
    draft: RoleEngine
    twin: RoleEngine
    """A draft that is the target itself."""
    path: Path | None = None
    """The path of the written target, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """The settings that jobs are served with."""

    num_draft_tokens: int = 0
    """0 is without a draft."""
    run_ahead: int = 1
    slots: int = 4
    context_tokens: int = 96
    chunk_tokens: int = 8
    page_tokens: int = 4
    num_pages: int | None = None
    debug: bool = True
    no_prefix_cache: bool = False

    def config(self, log_dir: Path | None) -> SchedulerConfig:
        """The scheduler's settings."""
        return SchedulerConfig(
            verify="unix:/none",
            fixed_draft_tokens=max(1, self.num_draft_tokens),
            draft_timeout_ms=PATIENCE_MS,
            run_ahead=self.run_ahead,
            slots=self.slots,
            context_tokens=self.context_tokens,
            max_batched_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            debug=self.debug,
            no_prefix_cache=self.no_prefix_cache,
            access_log_dir=log_dir,
        )


class Served:
    """Workers in this process, and an epoch over them."""

    def __init__(
        self, models: Models, way: Way, *, log_dir: Path | None = None, strip: FenceName | None = None
    ) -> None:
        """`strip`: a fence whose waits are left out of every command."""
        self._strip = strip
        self._open = ExitStack()
        roles = [models.verify, models.draft][: 2 if way.num_draft_tokens else 1]
        workers = self._open.enter_context(local_workers(*roles, log_dir=log_dir, before_send=self._stripped))
        self.epoch = LocalEpoch(1, way.config(log_dir), workers, num_pages=way.num_pages)

    def run(self, *waves: list[Job]) -> list[list[int]]:
        """Returns the new tokens of each job."""
        outputs = self.epoch.run(*waves)
        self.close()
        return [outputs[job] for wave in waves for job in wave]

    def close(self) -> None:
        """Ends the workers."""
        self._open.close()

    def _stripped(self, command: StepCommand) -> StepCommand:
        waits = tuple(point for point in command.ops.waits if point.fence is not self._strip)
        return replace(command, ops=FenceOps(waits, command.ops.signals))
