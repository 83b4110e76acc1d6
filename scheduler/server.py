"""The scheduler process: gateways' streams on the event loop, and the worker session on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from slipstream.common.device.choose import choose_device
from slipstream.common.errors import ConfigError, SlipstreamError
from slipstream.common.host import yield_to_streams
from slipstream.common.idle_collection import IdleCollection
from slipstream.common.rpc.address import SAME_HOST, UnixAddress, parse_address
from slipstream.common.rpc.logs import escaped
from slipstream.common.rpc.metrics import BUILD_INFO, RpcMetrics, make_registry, serve_metrics
from slipstream.common.rpc.serving import GrpcServer
from slipstream.common.rpc.shutdown import ShutdownSignals, raise_failure
from slipstream.common.wire.events import make_log_directory
from slipstream.common.wire.server import SchedulerDescription, SchedulerState, ServerState, ServiceState
from slipstream.protos import scheduler_pb2_grpc, trace_pb2_grpc
from slipstream.scheduler import metrics
from slipstream.scheduler.service import MAX_RECEIVE_BYTES, SERVICE_NAME, SchedulerServicer
from slipstream.scheduler.session import FINAL_ERRORS, WorkerSession
from slipstream.scheduler.timeline import SERVICE_NAME as TIMELINE
from slipstream.scheduler.timeline import TimelineServicer
from slipstream.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry, Metric

    from slipstream.common.device.interface import Device
    from slipstream.common.rpc.listener import Listener
    from slipstream.common.rpc.metrics import MetricSpec
    from slipstream.common.wire.server import DraftSwap, SwapOutcome
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig
    from slipstream.scheduler.draft_session import DraftSession
    from slipstream.scheduler.epoch import Epoch
    from slipstream.scheduler.page_log import PageLog
    from slipstream.scheduler.session import MakeLink

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0


async def run_scheduler(
    config: SchedulerConfig,
    listener: Listener,
    metrics_port: int | None,
    metrics_host: str,
    *,
    device: Device | None = None,
    make_link: MakeLink | None = None,
) -> int:
    """Serves until a signal, or until verify turns out not to fit; returns the exit status.

    `device` replaces the one that the configuration asks for. `make_link` makes links to workers other than the
    services at the addresses of the configuration. Raises ConfigError for an address that is no Unix socket, and
    for a directory of access logs that cannot be made.
    """
    if not isinstance(parse_address(listener.address), UnixAddress):
        raise ConfigError("listen", listener.address, "unix:PATH, for gateways; slipstream-gateway has the clients")
    make_log_directory(config.access_log_dir)
    device = device or choose_device(config.device, config.fence)
    if device.has_stream_threads:
        yield_to_streams()
    registry = make_registry()
    queue = WaitingQueue(config.max_sequences)
    with ExitStack() as held:
        signals = held.enter_context(ShutdownSignals())
        port = held.enter_context(serve_metrics(registry, metrics_port, metrics_host))
        server = GrpcServer(
            listener, metrics=RpcMetrics(registry), keepalive=SAME_HOST, max_receive_bytes=MAX_RECEIVE_BYTES
        )
        serving = _Serving(config, server, queue, signals, metrics_port=port)
        ServerMetrics(registry, epoch=serving.epoch)
        scheduler = serving.servicer
        server.add_service(SERVICE_NAME, scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler)
        server.add_service(TIMELINE, trace_pb2_grpc.add_TimelineServicer_to_server, TimelineServicer(serving.epoch))
        await server.start()
        session = WorkerSession(
            config, device, queue, registry=registry, listener=serving, sink=scheduler.put, make_link=make_link
        )
        serving.drafts = session.drafts
        # A full garbage collection stops all threads, the step loop's too, for up to a tenth of a second.
        collection = IdleCollection(keeps_young=True)
        held.enter_context(collection.in_charge())
        collecting = asyncio.create_task(collection.run(queue.holds_any))
        collecting.add_done_callback(raise_failure)
        held.callback(collecting.cancel)
        session.start()
        await signals.wait()
        await serving.finish(config.grace_s)
        await asyncio.get_running_loop().run_in_executor(None, session.join)
        scheduler.close(str(serving.failure or "the scheduler is shutting down"))
        await server.stop(STOP_GRACE_S)
    return 0 if serving.failure is None else serving.report()


class _Serving:
    """The epoch that is served now. A `SessionListener`: called on the session's thread."""

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
        self.drafts: DraftSession
        """Set before the session starts."""
        self.servicer = SchedulerServicer(queue, self.describe, self._swap, self._page_log)
        self._config = config
        self._server = server
        self._queue = queue
        self._signals = signals
        self._metrics_port = metrics_port
        self._loop = asyncio.get_running_loop()
        self._epoch: Epoch | None = None
        self._is_ending = False

    def epoch(self) -> Epoch | None:
        """The current epoch, or the last; None before the first."""
        return self._epoch

    def _page_log(self) -> PageLog | None:
        return None if self._epoch is None else self._epoch.batch.pages.log

    def attached(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._change(SchedulerState(serving=self.describe()))
        mps, extra = "on" if epoch.under_mps else "off", {"epoch": epoch.number}
        text = "serving %s, algorithm %s, fence %s, MPS %s, %d tokens in steps that decode and take in prompts"
        sizes = epoch.batch.sizes
        logger.info(text, epoch.verify.model, epoch.algorithm, epoch.fence_kind, mps, sizes.mixed_tokens, extra=extra)

    def detached(self, reason: str) -> None:
        self._change(SchedulerState(paused=reason))

    def failed(self, error: SlipstreamError) -> None:
        self.failure = error
        self._change(SchedulerState(paused=str(error), is_final=isinstance(error, FINAL_ERRORS)))
        self._loop.call_soon_threadsafe(self._signals.request)

    async def finish(self, grace_s: float) -> None:
        """Gives sequences time to end, then ends the loop. Gateways that end as well send no more by now."""
        self._is_ending = True
        self._server.set_serving(False)
        if not await asyncio.to_thread(self._queue.wait_until_empty, grace_s):
            logger.warning("%d sequences did not finish within %.0f s", self._queue.num_held, grace_s)
        self._queue.stop()

    def _change(self, state: SchedulerState) -> None:
        self._loop.call_soon_threadsafe(self._changed, state)

    def _changed(self, state: SchedulerState) -> None:
        self.servicer.set_state(state)
        # Workers may be back while the server is shutting down.
        self._server.set_serving(state.serving is not None and not self._is_ending)

    async def _swap(self, request: DraftSwap) -> SwapOutcome:
        return await asyncio.to_thread(self.drafts.swap, request)

    def report(self) -> int:
        """Prints the failure and returns the exit status."""
        print(f"slipstream-scheduler: {escaped(str(self.failure))}", file=sys.stderr)
        return 2 if isinstance(self.failure, ConfigError) else 1

    def describe(self) -> SchedulerDescription:
        """What the last epoch serves, and its load."""
        assert self._epoch is not None, "described while an epoch is served"
        epoch, sizes, verify, draft = self._epoch, self._epoch.sizes, self._epoch.verify, self._epoch.draft
        drafts = self.drafts
        state = "resting" if epoch.speculation.resting is not None else drafts.status.state
        scheduler = ServiceState(
            name="scheduler", address=self._server.address, pid=os.getpid(), metrics_port=self._metrics_port
        )
        services = [scheduler, _service(verify, self._config.verify)]
        if draft is not None:
            services.append(_service(draft, drafts.address))
        grammar = None if epoch.constraints is None else epoch.constraints.active
        if grammar is not None and self._config.grammar is not None:
            services.append(_service(grammar.description, self._config.grammar))
        num_wanted = drafts.target.num_draft_tokens
        num_wanted = sizes.batch.num_draft_tokens if num_wanted is None else num_wanted
        server = ServerState(
            version=version("slipstream-serve"),
            model=verify.model,
            vocab_size=verify.vocab_size,
            context_tokens=sizes.context_tokens,
            algorithm=epoch.algorithm,
            num_draft_tokens=epoch.num_draft_tokens or num_wanted,
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
            under_mps=epoch.under_mps,
            draft_state=state,
            draft_state_seconds=time.monotonic() - drafts.status.since if drafts.status.state else 0.0,
            draft_problem=drafts.status.problem,
            num_preemptions=epoch.batch.counts.preemptions,
            max_batched_tokens=epoch.batch.sizes.mixed_tokens,
        )
        return SchedulerDescription(
            server=server,
            tokenizer_path=str(verify.tokenizer_path),
            eos_token_ids=tuple(verify.eos_token_ids),
            max_sequences=self._queue.capacity,
            most_draft_tokens=sizes.batch.num_draft_tokens,
            constraints=self._config.grammar is not None and verify.takes_masks,
        )


def _service(worker: WorkerDescription, address: str) -> ServiceState:
    return ServiceState(
        name=worker.role.value,
        address=address,
        pid=worker.pid,
        metrics_port=worker.metrics_port,
        model=worker.model,
        device=worker.device,
        shared_weight_bytes=worker.shared_weight_bytes,
    )


class ServerMetrics(Collector):
    """Makes its metrics anew at each scrape, so none of an older epoch stays. Has none before the first epoch."""

    def __init__(self, registry: CollectorRegistry, *, epoch: Callable[[], Epoch | None]) -> None:
        """`epoch` returns the current epoch, or the last one; None before the first."""
        self._epoch = epoch
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Returns the families without values: registering needs no epoch."""
        return [spec.family() for spec in (BUILD_INFO, *metrics.SERVER_SPECS)]

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`; called on the scraper's thread."""
        epoch = self._epoch()
        if epoch is None:
            return []
        verify, sizes, pages = epoch.verify, epoch.sizes.batch, epoch.batch.pages
        build = ("scheduler", version("slipstream-serve"), verify.model, verify.device, *epoch.labels)
        # A drafter without a KV cache has no pool.
        pools = [worker for worker in (verify, epoch.draft) if worker is not None and worker.kv_bytes_per_token]
        values: dict[MetricSpec, dict[tuple[str, ...], float]] = {
            BUILD_INFO: {build: 1},
            metrics.EPOCH: {(): epoch.number},
            metrics.RUN_AHEAD: {(): sizes.run_ahead},
            metrics.NUM_DRAFT_TOKENS: {(): epoch.num_draft_tokens},
            metrics.SLOTS: {(): epoch.batch.slots.num_slots},
            metrics.KV_PAGES: {(pool.role.value,): pages.num_pages for pool in pools},
            metrics.KV_PAGES_USED: {(pool.role.value,): pages.num_pages - pages.num_free for pool in pools},
            metrics.KV_PAGE_BYTES: {(pool.role.value,): pool.kv_bytes_per_token * sizes.page_tokens for pool in pools},
        }
        families = []
        for spec, by_labels in values.items():
            families.append(spec.family())
            for labels, value in by_labels.items():
                families[-1].add_metric(labels, value)
        return families
