"""The gateway process: the clients' service on the event loop, and the link to the scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from slipstream.common.errors import RETRY_AFTER_MS, CheckpointError, UnavailableError
from slipstream.common.idle_collection import IdleCollection
from slipstream.common.rpc.access import MAX_CALLS, AccessSettings
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.metrics import RpcMetrics, make_registry, serve_metrics
from slipstream.common.rpc.service_options import report
from slipstream.common.rpc.serving import GrpcServer
from slipstream.common.rpc.shutdown import ShutdownSignals, raise_failure
from slipstream.common.wire.server import ServerState, ServiceState
from slipstream.gateway.config import GenerationConfig, gateway_name
from slipstream.gateway.constraints import GrammarCompiler
from slipstream.gateway.job import JobStore
from slipstream.gateway.jobs import JobManager
from slipstream.gateway.journal_file import JournalFile, JournalMode
from slipstream.gateway.keys import KeyFile, KeyInterceptor, key_or_client_of
from slipstream.gateway.metrics import CompatMetrics, RequestMetrics, ServerInfo
from slipstream.gateway.model import load_model
from slipstream.gateway.peers import SERVICE_NAME as PEERS_NAME
from slipstream.gateway.peers import Forwarding, FromPeers, GatewayState, Peers
from slipstream.gateway.request import MAX_SAMPLES
from slipstream.gateway.scheduler import SchedulerLink, watch_pages
from slipstream.gateway.service import RECORDER, SERVICE_NAME, GenerationServicer, RecorderServicer
from slipstream.gateway.stream import StreamWrites
from slipstream.gateway.tokenize_queue import NUM_THREADS, TokenizeQueue
from slipstream.protos import generation_pb2_grpc, peers_pb2_grpc, trace_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from slipstream.gateway.config import GatewayConfig
    from slipstream.gateway.delivery import Deliveries

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
LOAD_S = 10.0
"""Time between two lines of the log about the load, while there is one."""


async def run_gateway(config: GatewayConfig, listener: Listener, metrics_port: int | None, metrics_host: str) -> int:
    """Serves until a signal, or until the model's tokenizer cannot be loaded; returns the exit status."""
    registry = make_registry()
    servers: list[GrpcServer] = []
    async with AsyncExitStack() as held:
        signals = held.enter_context(ShutdownSignals())
        port = held.enter_context(serve_metrics(registry, metrics_port, metrics_host))
        executor = held.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer"))
        compiling = held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="grammars"))
        private: Listener | None = None
        if config.private_listen is not None:
            private = held.enter_context(Listener.claim(config.private_listen, field="private_listen"))
        metrics = RequestMetrics(registry, num_running=lambda: link.num_running, num_waiting=lambda: link.num_waiting)
        health = _Health(servers)
        link = _make_link(config, metrics, health)
        ServerInfo(
            registry,
            queue_capacity=config.own_queue,
            state=lambda: None if link.description is None else link.description.server,
        )
        if config.compat_metrics:
            CompatMetrics(
                registry,
                num_running=lambda: link.num_running,
                num_waiting=lambda: link.num_waiting,
                state=link.read_state,
            )
        jobs = _make_jobs(config, metrics, link, health)
        own_state = partial(_own_state, config, listener.address, port, link)
        peers = await held.enter_async_context(Peers(config.shard, config.private_addresses, jobs, own_state))
        state = partial(_server_state, link, peers, config.queue)
        writes = StreamWrites(config.read_timeout_s, metrics.cut_off.inc)
        grammars = GrammarCompiler(TokenizeQueue(compiling, num_threads=1), metrics)
        held.callback(grammars.close)
        servicer = GenerationServicer(
            jobs,
            model=link.model,
            state=state,
            turns=TokenizeQueue(executor),
            grammars=grammars,
            peers=peers,
            writes=writes,
            served_names=config.served_names,
        )
        forwarding = Forwarding(peers, writes)
        servers += _servers(config, listener, private, forwarding, RpcMetrics(registry))
        recorder = RecorderServicer(servicer.request_times)
        for server in servers:
            server.add_service(SERVICE_NAME, generation_pb2_grpc.add_GenerationServicer_to_server, servicer)
            server.add_service(RECORDER, trace_pb2_grpc.add_RecorderServicer_to_server, recorder)
        for server in servers[1:]:
            server.add_service(PEERS_NAME, peers_pb2_grpc.add_PeersServicer_to_server, peers)
        if config.vllm_engine:
            # Its messages are in an extra.
            from slipstream.gateway import vllm

            engine = vllm.VllmEngineServicer(
                servicer,
                jobs,
                model=link.model,
                state=state,
                is_serving=lambda: servers[0].is_serving,
                watch_pages=partial(watch_pages, config.scheduler),
            )
            for server in servers:
                server.add_service(vllm.SERVICE_NAME, vllm.add_to_server, engine)
        return await _serve(link, jobs, servers, forwarding, servicer.deliveries, signals, config.grace_s)


class _Health:
    """The answer of servers to health checks: whether there is a scheduler, and the journal takes jobs."""

    def __init__(self, servers: Sequence[GrpcServer]) -> None:
        self._servers = servers
        self._has_scheduler, self._is_writable = False, True

    def set_serving(self, is_serving: bool) -> None:
        """Called by the link to the scheduler."""
        self._has_scheduler = is_serving
        self._tell()

    def set_writable(self, is_writable: bool) -> None:
        """Called by the journal."""
        self._is_writable = is_writable
        self._tell()

    def _tell(self) -> None:
        for server in self._servers:
            server.set_serving(self._has_scheduler and self._is_writable)


def _make_link(config: GatewayConfig, metrics: RequestMetrics, health: _Health) -> SchedulerLink:
    return SchedulerLink(
        config.scheduler,
        partial(
            load_model,
            max_samples=min(MAX_SAMPLES, config.own_queue),
            chat_template=config.chat_template,
            has_defaults=config.generation_config == GenerationConfig.AUTO,
        ),
        capacity=config.own_queue,
        outage_timeout_s=config.outage_timeout_s,
        max_lost_epochs=config.max_lost_epochs,
        on_serving=health.set_serving,
        on_given_up=metrics.given_up.inc,
    )


def _make_jobs(config: GatewayConfig, metrics: RequestMetrics, link: SchedulerLink, health: _Health) -> JobManager:
    """Raises ConfigError or FailedPreconditionError for a journal that cannot be used."""
    path, mode, interval_ms = config.journal_path, JournalMode(config.journal), config.stream_interval_ms
    return JobManager(
        link,
        JobStore(capacity=config.kept_jobs, ttl_s=config.job_ttl_s, max_bytes=config.kept_mib * 2**20),
        metrics,
        shard=config.shard,
        stream_interval_s=link.stream_interval_s if interval_ms is None else lambda: interval_ms / 1000,
        key_tokens=config.key_tokens,
        on_writable=health.set_writable,
        logs_requests=config.log_requests,
        journal_file=None if path is None or mode is JournalMode.OFF else JournalFile.open(path, mode),
    )


async def _serve(
    link: SchedulerLink,
    jobs: JobManager,
    servers: Sequence[GrpcServer],
    forwarding: Forwarding,
    deliveries: Deliveries,
    signals: ShutdownSignals,
    grace_s: float,
) -> int:
    """Serves until a signal, or until the link gives up; returns the exit status."""
    for server in servers:
        await server.start()
    linked = asyncio.create_task(link.run(jobs))
    linked.add_done_callback(lambda _: signals.request())
    collecting = asyncio.create_task(_collect_when_idle(jobs, servers))
    collecting.add_done_callback(raise_failure)
    logging_load = asyncio.create_task(log_load(jobs, link))
    logging_load.add_done_callback(raise_failure)
    await signals.wait()
    logging_load.cancel()
    if not linked.done():  # otherwise no job can end
        await _finish(link, jobs, forwarding, grace_s)
    deliveries.close()
    await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in servers))
    collecting.cancel()
    linked.cancel()
    try:
        await linked
    except asyncio.CancelledError:
        return 0
    except CheckpointError as error:
        return report("gateway", error)
    finally:
        await jobs.journal.close()


def _servers(
    config: GatewayConfig, listener: Listener, private: Listener | None, forwarding: Forwarding, metrics: RpcMetrics
) -> Iterable[GrpcServer]:
    """Yields the server for clients, and the one for this user and other gateways if there is such an address.

    Raises ConfigError for a file of keys that is wrong.
    """
    forwards = [forwarding] if config.gateways > 1 else []
    keys = None if config.api_keys is None else KeyFile(config.api_keys)
    asks = [] if keys is None else [KeyInterceptor(keys, max_streams=config.key_streams)]
    yield GrpcServer(
        listener,
        metrics=metrics,
        access=config,
        interceptors=asks,
        message_interceptors=forwards,
        client_of=key_or_client_of,
    )
    if private is not None and config.gateways > 1:
        # A call that is forwarded was counted where it arrived.
        access = AccessSettings(max_calls=min(MAX_CALLS, config.max_calls * config.gateways))
        yield GrpcServer(
            private,
            access=access,
            interceptors=[FromPeers(), *(one.optional() for one in asks)],
            message_interceptors=forwards,
            max_streams=config.max_calls,
            client_of=key_or_client_of,
        )
    elif private is not None:
        # A door calls there for all of its clients.
        yield GrpcServer(
            private,
            metrics=metrics,
            access=AccessSettings(max_calls=config.max_calls),
            interceptors=[one.optional() for one in asks],
            max_streams=config.max_calls,
            client_of=key_or_client_of,
        )


async def _collect_when_idle(jobs: JobManager, servers: Sequence[GrpcServer]) -> NoReturn:
    """Keeps full garbage collections out of the time with jobs or calls: with many streams they take 100 ms each."""
    collection = IdleCollection(keeps_young=True)
    with collection.in_charge():
        await collection.run(lambda: bool(jobs.num_jobs) or any(server.num_calls for server in servers))


async def log_load(jobs: JobManager, link: SchedulerLink, interval_s: float = LOAD_S) -> NoReturn:
    """Logs the tokens in a second and the outputs that run and wait, now and then while there are any."""
    before = jobs.num_generated
    while True:
        await asyncio.sleep(interval_s)
        num_new, before = jobs.num_generated - before, jobs.num_generated
        if num_new or link.num_running or link.num_waiting:
            load = (num_new / interval_s, link.num_running, link.num_waiting)
            logger.info("%.1f tokens/s generated, %d outputs running, %d waiting", *load)


def _own_state(config: GatewayConfig, address: str, metrics_port: int, link: SchedulerLink) -> GatewayState:
    name = "gateway"
    if config.gateways > 1:
        name, address = gateway_name(config.gateway_index), config.private_addresses[config.gateway_index]
    service = ServiceState(name=name, address=address, pid=os.getpid(), metrics_port=metrics_port)
    return GatewayState(service, link.num_waiting)


async def _server_state(link: SchedulerLink, peers: Peers, queue: int) -> ServerState:
    """Describes the whole server: all gateways, the scheduler and its workers."""
    scheduler, gateways = (await link.describe()).server, await peers.states()
    return replace(
        scheduler,
        queue_capacity=queue,
        num_waiting=sum(gateway.num_waiting for gateway in gateways),
        services=(*(gateway.service for gateway in gateways), *scheduler.services),
    )


async def _finish(link: SchedulerLink, jobs: JobManager, forwarding: Forwarding, grace_s: float) -> None:
    """Refuses new jobs and gives the others time to end, also those that its clients follow at other gateways."""
    link.shut(UnavailableError("the server is shutting down", retry_after_ms=RETRY_AFTER_MS))
    try:
        async with asyncio.timeout(grace_s):
            await asyncio.gather(jobs.wait_idle(), forwarding.wait_idle())
    except TimeoutError:
        logger.warning("%d jobs did not finish within %.0f s", jobs.num_jobs, grace_s)
