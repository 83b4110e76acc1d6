"""The thread that attaches the workers, runs the step loop, and starts over when a worker was lost."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from slipstream.common.device.manifest import EVENT
from slipstream.common.errors import (
    CheckpointError,
    ConfigError,
    ManifestError,
    MismatchError,
    OutOfMemoryError,
    SlipstreamError,
)
from slipstream.common.host import STEP_LOOP, name_this_thread, pid_namespace, shm_device
from slipstream.common.worker.step import Role
from slipstream.scheduler.telemetry.step_metrics import StepMetricFamilies, StepMetrics
from slipstream.scheduler.workers.epoch import Epoch
from slipstream.scheduler.workers.heartbeats import Heartbeats
from slipstream.scheduler.workers.link import LinkThread, WorkerLink
from slipstream.scheduler.workers.sizing import EpochSizes, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry

    from slipstream.common.device.interface import Device
    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.core.outbox import OutputSink
    from slipstream.scheduler.core.waiting_queue import WaitingQueue
    from slipstream.scheduler.workers.link import Link

logger = logging.getLogger(__name__)

FINAL_ERRORS = (MismatchError, ConfigError, CheckpointError, ManifestError, OutOfMemoryError)
"""Errors that a retry cannot fix."""
RETRY_S = 0.2
"""Between two tries to reach the workers."""


class SessionListener(Protocol):
    """Gets the events of a session, on the session's thread; must return at once."""

    def attached(self, epoch: Epoch) -> None:
        """Called when sequences can run."""
        ...

    def detached(self, reason: str) -> None:
        """Called when a worker was lost."""
        ...

    def failed(self, error: SlipstreamError) -> None:
        """Called for an error that a retry cannot fix: the workers do not fit each other, or a setting is wrong."""
        ...


class WorkerSession:
    """Runs epochs one after the other until the queue is stopped."""

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        queue: WaitingQueue,
        *,
        registry: CollectorRegistry,
        listener: SessionListener,
        sink: OutputSink,
        make_links: Callable[[], dict[Role, Link]] | None = None,
    ) -> None:
        """`make_links`: makes links to workers other than the services at the addresses of the configuration."""
        self._config = config
        self._device = device
        self._queue = queue
        self._listener = listener
        self._sink = sink
        self._metric_families = StepMetricFamilies(registry)
        self._links = LinkThread()
        self._make_links = make_links or self._links_to_services
        self._heartbeats = Heartbeats(registry, {} if make_links is not None else self._addresses(), self._links)
        self._thread = threading.Thread(target=self._run, name="loop")
        self._last_epoch = 0
        self._last_cause = ""

    def start(self) -> None:
        """Starts the thread."""
        self._heartbeats.start()
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the thread; stop the queue first."""
        self._thread.join()
        self._heartbeats.close()
        self._links.close()

    def _run(self) -> None:
        name_this_thread(STEP_LOOP)
        try:
            while not self._queue.is_stopped:
                self._run_once(self._make_links())
        except SlipstreamError as error:
            logger.error("%s", error)
            self._listener.failed(error)
        except Exception as error:
            logger.exception("the loop failed")
            self._listener.failed(SlipstreamError(f"the loop failed: {error!r}"))

    def _links_to_services(self) -> dict[Role, Link]:
        return {role: WorkerLink(role, address, self._links) for role, address in self._addresses().items()}

    def _addresses(self) -> dict[Role, str]:
        config = self._config
        return {Role.VERIFY: config.verify} | ({} if config.draft is None else {Role.DRAFT: config.draft})

    def _run_once(self, links: dict[Role, Link]) -> None:
        """Runs one epoch if the workers are there. Raises errors that a retry cannot fix."""
        try:
            epoch = self._epoch_with(links)
        except SlipstreamError as error:
            _close(links)
            if isinstance(error, FINAL_ERRORS):
                raise
            logger.debug("waiting for the workers: %s", error)
            self._queue.wait_for_stop(RETRY_S)
            return
        reason = None
        try:
            self._run_epoch(epoch)
        except FINAL_ERRORS as error:
            reason = str(error)
            raise
        except SlipstreamError as error:
            reason = f"epoch {epoch.number} is over: {error}"
            self._lose(epoch, reason)
        finally:
            self._queue.close()
            epoch.close(drain=reason is None)
        self._queue.wait_for_stop(RETRY_S)

    def _epoch_with(self, links: dict[Role, Link]) -> Epoch:
        verify = links[Role.VERIFY].describe()
        workers = Workers(verify=verify, draft=links[Role.DRAFT].describe() if Role.DRAFT in links else None)
        check_sharing(self._device, workers)
        labels = {
            "fence": self._device.fence_kind,
            "mps": "on" if workers.under_mps else "off",
            "algorithm": workers.algorithm,
        }
        return Epoch(
            self._next_epoch(workers),
            self._config,
            workers,
            EpochSizes.decide(self._config, workers),
            device=self._device,
            links=links,
            queue=self._queue,
            metrics=StepMetrics(self._metric_families, **labels),
            sink=self._sink,
        )

    def _run_epoch(self, epoch: Epoch) -> None:
        loop = epoch.open()
        self._queue.open(epoch.number)
        self._listener.attached(epoch)
        loop.run()
        loop.finish()

    def _lose(self, epoch: Epoch, reason: str) -> None:
        # The same cause again and again is logged as an error once.
        cause = reason.partition(": ")[2]
        level = logging.DEBUG if cause == self._last_cause else logging.ERROR
        logger.log(level, "%s", reason, extra={"epoch": epoch.number, "step": epoch.batch.last_step})
        self._last_cause = cause
        self._queue.close()
        self._listener.detached(reason)

    def _next_epoch(self, workers: Workers) -> int:
        """A number above every epoch that the workers or this process have seen."""
        seen = [worker.last_epoch for worker in (workers.verify, workers.draft) if worker is not None]
        self._last_epoch = max(self._last_epoch, *seen) + 1
        return self._last_epoch


def _close(links: dict[Role, Link]) -> None:
    for link in links.values():
        link.detach(drain=False)


def check_sharing(device: Device, workers: Workers) -> None:
    """Checks that the workers can share the device's memory with this process, before anything is shared.

    A handle that is opened in another PID namespace fails with an error that names another cause; an event in another
    /dev/shm does not fail at all, its waiter waits for ever. Raises MismatchError naming each difference and a remedy.
    """
    differences = [text for worker in workers.all for text in _differences(device, worker)]
    if differences:
        raise MismatchError(differences)


def _differences(device: Device, worker: WorkerDescription) -> Iterator[str]:
    """Compares what both sides know."""
    name = worker.role.value
    if worker.device != device.identity:
        is_one_on_cpu = "cpu" in (worker.device, device.identity)
        remedy = "--device" if is_one_on_cpu else "CUDA_VISIBLE_DEVICES"
        found = f"device: scheduler has {device.identity!r}, {name} has {worker.device!r}"
        yield f"{found} (start all services with the same {remedy})"
        return
    if device.identity == "cpu":
        return
    own = pid_namespace()
    if own and worker.pid_namespace not in ("", own):
        yield (
            f"PID namespace: scheduler has {own}, {name} has {worker.pid_namespace}: CUDA shares memory within one "
            "(containers share one by `pid:` in compose, by shareProcessNamespace in Kubernetes)"
        )
    shm = shm_device()
    if device.fence_kind == EVENT and shm and worker.shm_device not in (0, shm):
        yield (
            f"/dev/shm: scheduler has device {shm}, {name} has {worker.shm_device}: event fences lie there "
            "(containers share it by `ipc:` in compose, by one volume in Kubernetes; --fence timeline needs none)"
        )
