"""The scheduler's own thread: attaches the workers, runs the loop, and starts over when a worker was lost."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    MismatchError,
    SlipstreamError,
    StaleEpochError,
    UnavailableError,
)
from slipstream.common.step import Role
from slipstream.scheduler.epoch import Epoch
from slipstream.scheduler.sizing import EpochSizes, Workers
from slipstream.scheduler.step_metrics import StepMetricFamilies, StepMetrics
from slipstream.scheduler.worker_link import LinkThread, WorkerLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from slipstream.common.device.face import Device
    from slipstream.scheduler.batch import Delivery
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.job_queue import JobQueue

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""Between two looks whether the workers are there."""


class Audience(Protocol):
    """Who is told what happens here. Called on the conductor's thread; must return at once."""

    def attached(self, epoch: Epoch) -> None:
        """Jobs can run."""
        ...

    def detached(self, reason: str) -> None:
        """They cannot, for now."""
        ...

    def failed(self, error: SlipstreamError) -> None:
        """They never will: the workers do not fit each other, or a setting is wrong."""
        ...


class Conductor:
    """Runs epochs one after the other until the queue is stopped."""

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        queue: JobQueue,
        *,
        registry: CollectorRegistry,
        audience: Audience,
        deliver: Callable[[list[Delivery]], None],
    ) -> None:
        """`deliver` hands progress to the clients' side and returns at once."""
        self._config = config
        self._device = device
        self._queue = queue
        self._audience = audience
        self._deliver = deliver
        self._metric_families = StepMetricFamilies(registry)
        self._links = LinkThread()
        self._thread = threading.Thread(target=self._run, name="loop")
        self._last_epoch = 0

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Waits for its end, which a stopped queue brings about."""
        self._thread.join()
        self._links.close()

    def _run(self) -> None:
        try:
            while not self._queue.is_stopped:
                self._conduct(self._links_to_workers())
        except SlipstreamError as error:
            logger.error("%s", error)
            self._audience.failed(error)
        except Exception as error:
            logger.exception("the loop failed")
            self._audience.failed(SlipstreamError(f"the loop failed: {error!r}"))

    def _links_to_workers(self) -> dict[Role, WorkerLink]:
        links = {Role.VERIFY: WorkerLink(Role.VERIFY, self._config.verify, self._links)}
        if self._config.draft is not None:
            links[Role.DRAFT] = WorkerLink(Role.DRAFT, self._config.draft, self._links)
        return links

    def _conduct(self, links: dict[Role, WorkerLink]) -> None:
        """One epoch, if the workers are there."""
        try:
            workers = Workers(
                verify=links[Role.VERIFY].describe(),
                draft=links[Role.DRAFT].describe() if Role.DRAFT in links else None,
            )
        except (UnavailableError, DeadlineExceededError) as error:
            logger.debug("waiting for the workers: %s", error)
            _close(links)
            self._queue.wait_for_stop(RETRY_S)
            return
        epoch = Epoch(
            self._next_epoch(),
            self._config,
            workers,
            EpochSizes.decide(self._config, workers),
            device=self._device,
            links=links,
            queue=self._queue,
            metrics=StepMetrics(
                self._metric_families, fence=self._device.fence_kind, mps="off", algorithm=workers.algorithm
            ),
            deliver=self._deliver,
        )
        is_lost = False
        try:
            loop = epoch.open()
            self._queue.open()
            self._audience.attached(epoch)
            loop.run()
            loop.finish()
        except (MismatchError, StaleEpochError):
            is_lost = True
            raise
        except (UnavailableError, DeadlineExceededError, FailedPreconditionError) as error:
            is_lost = True
            self._lose(epoch, error)
        finally:
            self._queue.close("the scheduler is not attached to its workers")
            self._end_jobs(epoch, UnavailableError("the server is shutting down"))
            epoch.close(drain=not is_lost)

    def _lose(self, epoch: Epoch, error: SlipstreamError) -> None:
        reason = f"epoch {epoch.number} is over: {error}"
        logger.error("%s", reason)
        self._queue.close(reason)
        self._audience.detached(reason)
        self._end_jobs(epoch, UnavailableError(reason))
        self._queue.wait_for_stop(RETRY_S)

    def _end_jobs(self, epoch: Epoch, error: UnavailableError) -> None:
        deliveries = epoch.batch.fail(error, waiting=self._queue.take_all())
        if deliveries:
            self._deliver(deliveries)

    def _next_epoch(self) -> int:
        # Grows over restarts of the scheduler, too: a worker refuses an epoch that is not larger than its last.
        self._last_epoch = max(self._last_epoch + 1, time.time_ns() // 1_000_000)
        return self._last_epoch


def _close(links: dict[Role, WorkerLink]) -> None:
    for link in links.values():
        link.detach(drain=False)
