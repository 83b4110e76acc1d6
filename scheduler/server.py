"""The scheduler process: the gateway on the event loop, and the worker session on a thread of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING

from slipstream.common.api.server_state import ServerState, ServiceState
from slipstream.common.device.choose import choose_device
from slipstream.common.errors import (
    RETRY_AFTER_MS,
    ConfigError,
    FailedPreconditionError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.host import yield_to_streams
from slipstream.common.idle_collection import IdleCollection
from slipstream.common.rpc.metrics import RpcMetrics, make_registry, serve_metrics
from slipstream.common.rpc.serving import GrpcServer
from slipstream.common.rpc.shutdown import ShutdownSignals
from slipstream.gateway.fair_turns import NUM_THREADS, FairTurns
from slipstream.gateway.manager import JobManager, JobStore
from slipstream.gateway.request_metrics import RequestMetrics
from slipstream.gateway.servicer import SERVICE_NAME, GenerationServicer, ServedModel
from slipstream.gateway.throttle import OutputThrottle
from slipstream.gateway.tokenizer import load_tokenizer
from slipstream.gateway.validation import MAX_SAMPLES, RequestLimits
from slipstream.protos import generation_pb2_grpc, trace_pb2_grpc
from slipstream.scheduler.core.waiting_queue import WaitingQueue
from slipstream.scheduler.telemetry.server_metrics import ServerMetrics
from slipstream.scheduler.telemetry.timeline import SERVICE_NAME as TIMELINE
from slipstream.scheduler.telemetry.timeline import TimelineServicer
from slipstream.scheduler.workers.session import WorkerSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.api.sequence import Outputs, OutputSink
    from slipstream.common.device.interface import Device
    from slipstream.common.rpc.listener import Listener
    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.common.worker.step import Role
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.workers.epoch import Epoch
    from slipstream.scheduler.workers.link import Link

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
SWITCH_INTERVAL_S = 0.0001
"""The step loop releases the interpreter in each call of the driver and must soon get it back from the event loop."""


async def run_scheduler(
    config: SchedulerConfig,
    listener: Listener,
    metrics_port: int | None,
    *,
    device: Device | None = None,
    make_links: Callable[[], dict[Role, Link]] | None = None,
) -> int:
    """Serves until a signal, or until the workers turn out not to fit; returns the exit status.

    `device` replaces the one that the configuration asks for. `make_links` makes links to workers other than the
    services at the addresses of the configuration.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = device or choose_device(config.device, config.fence)
    if device.has_stream_threads:
        yield_to_streams()
    loop = asyncio.get_running_loop()
    registry = make_registry()
    queue = WaitingQueue(config.queue)
    with ExitStack() as held:
        signals = held.enter_context(ShutdownSignals())
        port = held.enter_context(serve_metrics(registry, metrics_port))
        executor = held.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer"))
        server = GrpcServer(listener, metrics=RpcMetrics(registry))
        serving = _Serving(config, server, queue, signals, metrics_port=port)
        ServerMetrics(registry, epoch=serving.epoch, queue=queue)
        jobs = JobManager(
            queue,
            JobStore(capacity=config.kept_jobs, ttl_s=config.job_ttl_s),
            RequestMetrics(registry, num_running=lambda: serving.num_running, num_waiting=lambda: len(queue)),
        )
        servicer = GenerationServicer(
            jobs,
            model=serving.model,
            state=serving.state,
            turns=FairTurns(executor),
            read_timeout_s=config.read_timeout_s,
        )
        server.add_service(SERVICE_NAME, generation_pb2_grpc.add_GenerationServicer_to_server, servicer)
        server.add_service(TIMELINE, trace_pb2_grpc.add_TimelineServicer_to_server, TimelineServicer(serving.epoch))
        await server.start()
        collection = IdleCollection()
        throttle = OutputThrottle(loop, config.stream_interval_ms / 1000, jobs.deliver)
        held.enter_context(collection.in_charge())
        held.callback(asyncio.create_task(collection.run()).cancel)
        session = WorkerSession(
            config,
            device,
            queue,
            registry=registry,
            listener=serving,
            sink=_CollectingSink(throttle, collection),
            make_links=make_links,
        )
        session.start()
        await signals.wait()
        await _finish(server, queue, jobs, config.grace_s)
        await loop.run_in_executor(None, session.join)
        await server.stop(STOP_GRACE_S)
    return 0 if serving.failure is None else serving.report()


async def _finish(server: GrpcServer, queue: WaitingQueue, jobs: JobManager, grace_s: float) -> None:
    """Refuses new jobs and gives the others time to end."""
    server.set_serving(False)
    queue.shut("the server is shutting down")
    try:
        async with asyncio.timeout(grace_s):
            await jobs.wait_idle()
    except TimeoutError:
        logger.warning("%d jobs did not finish within %.0f s", jobs.num_jobs, grace_s)
    queue.stop()


class _CollectingSink:
    """Implements `OutputSink`: passes output on, and tells the garbage collection that the process is at work."""

    def __init__(self, sink: OutputSink, collection: IdleCollection) -> None:
        self._sink = sink
        self._collection = collection

    def put(self, outputs: Outputs) -> None:
        """See `OutputSink.put`."""
        self._collection.worked()
        self._sink.put(outputs)


class _Serving:
    """The model and the epoch that are served now. A `SessionListener`: called on the session's thread."""

    def __init__(
        self,
        config: SchedulerConfig,
        server: GrpcServer,
        queue: WaitingQueue,
        signals: ShutdownSignals,
        *,
        metrics_port: int,
    ) -> None:
        self.failure: SlipstreamError | None = None
        self._config = config
        self._server = server
        self._queue = queue
        self._signals = signals
        self._metrics_port = metrics_port
        self._loop = asyncio.get_running_loop()
        self._epoch: Epoch | None = None
        self._model: ServedModel | None = None

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return 0 if self._epoch is None else self._epoch.batch.num_running

    def epoch(self) -> Epoch | None:
        """The current epoch, or the last; None before the first."""
        return self._epoch

    def attached(self, epoch: Epoch) -> None:
        """See `SessionListener.attached`. Raises CheckpointError when the tokenizer cannot be loaded."""
        verify = epoch.workers.verify
        limits = RequestLimits(
            vocab_size=verify.vocab_size,
            context_tokens=epoch.sizes.context_tokens,
            eos_token_ids=frozenset(verify.eos_token_ids),
            num_draft_tokens=epoch.sizes.batch.num_draft_tokens,
            max_samples=min(MAX_SAMPLES, self._queue.capacity),
        )
        self._model = ServedModel(load_tokenizer(verify.tokenizer_path), limits)
        self._epoch = epoch
        # All that is loaded by now stays: the collector need not look at it any more.
        gc.collect()
        gc.freeze()
        self._loop.call_soon_threadsafe(self._set_serving)
        algorithm = epoch.workers.algorithm
        mps = "on" if epoch.workers.under_mps else "off"
        extra = {"epoch": epoch.number}
        logger.info(
            "serving %s, algorithm %s, fence %s, MPS %s", verify.model, algorithm, epoch.fence_kind, mps, extra=extra
        )

    def _set_serving(self) -> None:
        # Workers may come back while the server is shutting down.
        if not self._queue.is_shut:
            self._server.set_serving(True)

    def detached(self, reason: str) -> None:
        """See `SessionListener.detached`."""
        self._model = None
        self._loop.call_soon_threadsafe(self._server.set_serving, False)

    def failed(self, error: SlipstreamError) -> None:
        """See `SessionListener.failed`."""
        self.failure = error
        self._model = None
        self._loop.call_soon_threadsafe(self._signals.request)

    def report(self) -> int:
        """Prints the failure and returns the exit status."""
        print(f"slipstream-scheduler: {self.failure}", file=sys.stderr)
        return 2 if isinstance(self.failure, ConfigError) else 1

    def model(self) -> ServedModel:
        """The model that requests are checked with.

        Raises UnavailableError if there is none now, FailedPreconditionError if there never will be one.
        """
        if self._model is None:
            raise self._absence()
        return self._model

    def state(self) -> ServerState:
        """The state of the server. Before the first attachment, raises the errors of `model`."""
        if self._epoch is None:
            raise self._absence()
        epoch, workers, sizes = self._epoch, self._epoch.workers, self._epoch.sizes
        scheduler = ServiceState(
            name="scheduler", address=self._server.address, pid=os.getpid(), metrics_port=self._metrics_port
        )
        services = [scheduler, _service(workers.verify, self._config.verify)]
        if workers.draft is not None and self._config.draft is not None:
            services.append(_service(workers.draft, self._config.draft))
        return ServerState(
            version=version("slipstream-serve"),
            model=workers.verify.model,
            vocab_size=workers.verify.vocab_size,
            context_tokens=sizes.context_tokens,
            algorithm=workers.algorithm,
            num_draft_tokens=sizes.batch.num_draft_tokens,
            run_ahead=sizes.batch.run_ahead,
            num_slots=epoch.batch.slots.num_slots,
            page_tokens=sizes.batch.page_tokens,
            num_pages=epoch.batch.pages.num_pages,
            num_free_pages=epoch.batch.pages.num_free,
            queue_capacity=self._queue.capacity,
            num_waiting=len(self._queue),
            num_running=epoch.batch.num_running,
            epoch=epoch.number,
            services=tuple(services),
            fence=epoch.fence_kind,
            under_mps=workers.under_mps,
        )

    def _absence(self) -> SlipstreamError:
        if self.failure is not None:
            return FailedPreconditionError(f"this server cannot serve and is about to end: {self.failure}")
        return UnavailableError("the scheduler is not attached to its workers", retry_after_ms=RETRY_AFTER_MS)


def _service(worker: WorkerDescription, address: str) -> ServiceState:
    return ServiceState(
        name=worker.role.value,
        address=address,
        pid=worker.pid,
        metrics_port=worker.metrics_port,
        model=worker.model,
        device=worker.device,
    )
