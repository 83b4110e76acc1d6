"""Services in this process: their engines on one stream, and a scheduler's loop over them, fed with jobs directly."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

from prometheus_client import CollectorRegistry

from slipstream.benchmarks.in_process import LocalLink
from slipstream.common.errors import UnavailableError
from slipstream.common.worker.access_log import NullAccessLog
from slipstream.common.worker.step import Role
from slipstream.scheduler.core.waiting_queue import WaitingQueue
from slipstream.scheduler.telemetry.step_metrics import StepMetricFamilies, StepMetrics
from slipstream.scheduler.workers.epoch import Epoch
from slipstream.scheduler.workers.sizing import EpochSizes, Workers
from slipstream.services.worker.engine import Engine

if TYPE_CHECKING:
    from collections import abc
    from collections.abc import Callable, Iterator

    from slipstream.common.api.sequence import Outputs, SubmittedSequence
    from slipstream.common.device.interface import Device
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.core.loop import StepLoop
    from slipstream.scheduler.core.sequence import Sequence
    from slipstream.scheduler.telemetry.timings import StepTiming
    from slipstream.services.worker.engine import RoleEngine

TIMEOUT_S = 300.0
"""For the jobs of one call: far more than they take."""


class LocalServices:
    """Verify, and perhaps draft, loaded once for any number of epochs, one after the other."""

    def __init__(self, device: Device, make_roles: Callable[[], list[RoleEngine]]) -> None:
        """`make_roles` loads the models, on the thread that owns the device."""
        self._device = device
        self._failures: list[BaseException] = []
        with ExitStack() as held:
            stream = device.create_stream("steps", self._failures.append)
            held.callback(stream.close)
            self._thread = held.enter_context(ThreadPoolExecutor(1, "device", stream.bind_thread))
            self._engines = self._thread.submit(
                lambda: [Engine(role, device, stream, NullAccessLog()) for role in make_roles()]
            ).result()
            for engine in self._engines:
                held.callback(self._close, engine)
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the engines and the stream."""
        self._held.close()

    @contextmanager
    def serving(self, config: SchedulerConfig) -> Iterator[LocalServing]:
        """An epoch, with a loop of its own, for as long as the context."""
        links = {engine.description.role: LocalLink(engine, self._thread, self._failures) for engine in self._engines}
        number = 1 + max(engine.last_epoch for engine in self._engines)
        serving = LocalServing(number, config, self._device, links)
        try:
            yield serving
        finally:
            serving.close()

    def _close(self, engine: Engine) -> None:
        self._thread.submit(engine.close).result()


class LocalServing:
    """An epoch that takes jobs."""

    def __init__(self, number: int, config: SchedulerConfig, device: Device, links: dict[Role, LocalLink]) -> None:
        """Attaches the engines, and starts the loop on a thread."""
        draft = links.get(Role.DRAFT)
        workers = Workers(verify=links[Role.VERIFY].describe(), draft=None if draft is None else draft.describe())
        self._metrics = _RecordingMetrics(device.fence_kind, workers.algorithm)
        self._queue = WaitingQueue(config.queue)
        self._epoch = Epoch(
            number,
            config,
            workers,
            EpochSizes.decide(config, workers),
            device=device,
            links=dict(links),
            queue=self._queue,
            metrics=self._metrics,
            sink=self,
        )
        self._outputs: dict[SubmittedSequence, list[int]] = {}
        self._waiting: deque[Sequence] = deque()
        self._num_open = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        try:
            loop = self._epoch.open()
        except BaseException:
            self._epoch.close(drain=False)
            raise
        self._queue.open()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="loop")
        self._thread.start()

    @property
    def timings(self) -> list[StepTiming]:
        """Of all steps so far; the caller may clear it."""
        return self._metrics.timings

    def run(self, jobs: abc.Sequence[Sequence], *, at_once: int) -> list[list[int]]:
        """The tokens of each job; `at_once` of them are there at a time. Raises what ended the loop."""
        with self._changed:
            self._outputs = {job: [] for job in jobs}
            self._waiting = deque(jobs)
            self._num_open = len(jobs)
            first = [self._waiting.popleft() for _ in range(min(at_once, len(jobs)))]
        self._queue.add(*first)
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._num_open == 0 or self._failure is not None, TIMEOUT_S)
        if self._failure is not None:
            raise self._failure
        if not is_done:
            raise UnavailableError(f"{self._num_open} jobs did not end within {TIMEOUT_S:.0f} s")
        return [self._outputs[job] for job in jobs]

    def close(self) -> None:
        """Ends the loop and the epoch."""
        self._queue.stop()
        self._thread.join()
        self._epoch.close(drain=self._failure is None)

    def _run(self, loop: StepLoop) -> None:
        try:
            loop.run()
            loop.finish()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def put(self, outputs: Outputs) -> None:
        for job, progress in outputs:
            self._outputs[job] += progress.token_ids
            if progress.error is not None:
                raise progress.error
            if not progress.is_last:
                continue
            with self._changed:
                self._num_open -= 1
                following = self._waiting.popleft() if self._waiting else None
                self._changed.notify_all()
            if following is not None:
                self._queue.add(following)


class _RecordingMetrics(StepMetrics):
    """Keeps the time of each step."""

    def __init__(self, fence: str, algorithm: str) -> None:
        super().__init__(StepMetricFamilies(CollectorRegistry()), fence=fence, mps="off", algorithm=algorithm)
        self.timings: list[StepTiming] = []

    def observe(self, timing: StepTiming) -> None:
        """Keeps it, too."""
        self.timings.append(timing)
        super().observe(timing)
