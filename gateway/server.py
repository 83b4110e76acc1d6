"""The gateway process: the clients' service on the event loop, and the link to the scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from slipstream.common.api.server_state import ServerState, ServiceState
from slipstream.common.errors import CheckpointError, UnavailableError
from slipstream.common.idle_collection import CHECK_INTERVAL_S, IdleCollection
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.metrics import RpcMetrics, make_registry, serve_metrics
from slipstream.common.rpc.serving import GrpcServer
from slipstream.common.rpc.shutdown import ShutdownSignals
from slipstream.gateway.fair_turns import NUM_THREADS, FairTurns
from slipstream.gateway.job_store import JobStore
from slipstream.gateway.journal_file import JournalFile, JournalMode
from slipstream.gateway.keys import KeyFile, KeyInterceptor, TokenQuota
from slipstream.gateway.manager import JobManager
from slipstream.gateway.request_metrics import RequestMetrics, ServerInfo
from slipstream.gateway.scheduler_link import RETRY_AFTER_MS, SchedulerLink
from slipstream.gateway.served_model import load_model
from slipstream.gateway.servicer import SERVICE_NAME, GenerationServicer
from slipstream.gateway.validation import MAX_SAMPLES
from slipstream.protos import generation_pb2_grpc

if TYPE_CHECKING:
    from slipstream.gateway.config import GatewayConfig

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0


async def run_gateway(config: GatewayConfig, listener: Listener, metrics_port: int | None) -> int:
    """Serves until a signal, or until the model's tokenizer cannot be loaded; returns the exit status."""
    registry = make_registry()
    with ExitStack() as held:
        signals = held.enter_context(ShutdownSignals())
        port = held.enter_context(serve_metrics(registry, metrics_port))
        executor = held.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer"))
        rpc_metrics = RpcMetrics(registry)
        server = GrpcServer(listener, metrics=rpc_metrics, access=config, interceptors=_interceptors(config))
        servers = [server]
        if config.private_listen is not None:
            private = held.enter_context(Listener.claim(config.private_listen, field="private_listen"))
            servers.append(GrpcServer(private, metrics=rpc_metrics))

        def set_serving(is_serving: bool) -> None:
            for one in servers:
                one.set_serving(is_serving)

        link = SchedulerLink(
            config.scheduler,
            partial(load_model, max_samples=min(MAX_SAMPLES, config.queue)),
            capacity=config.queue,
            outage_timeout_s=config.outage_timeout_s,
            on_serving=set_serving,
        )
        ServerInfo(
            registry,
            queue_capacity=config.queue,
            state=lambda: None if link.description is None else link.description.server,
        )
        path, mode = config.journal_path, JournalMode(config.journal)
        interval_ms = config.stream_interval_ms
        jobs = JobManager(
            link,
            JobStore(capacity=config.kept_jobs, ttl_s=config.job_ttl_s, max_bytes=config.kept_mib * 2**20),
            RequestMetrics(registry, num_running=lambda: link.num_running, num_waiting=lambda: link.num_waiting),
            stream_interval_s=link.stream_interval_s if interval_ms is None else lambda: interval_ms / 1000,
            quota=TokenQuota(config.key_tokens),
            journal_file=None if path is None or mode is JournalMode.OFF else JournalFile.open(path, mode),
        )

        async def state() -> ServerState:
            gateway = ServiceState(name="gateway", address=server.address, pid=os.getpid(), metrics_port=port)
            behind = (await link.describe()).server
            return replace(
                behind,
                queue_capacity=config.queue,
                num_waiting=link.num_waiting,
                services=(gateway, *behind.services),
            )

        servicer = GenerationServicer(
            jobs, model=link.model, state=state, turns=FairTurns(executor), read_timeout_s=config.read_timeout_s
        )
        for one in servers:
            one.add_service(SERVICE_NAME, generation_pb2_grpc.add_GenerationServicer_to_server, servicer)
        if config.vllm_engine:
            # Its messages come with an extra.
            from slipstream.gateway import vllm_engine

            engine = vllm_engine.VllmEngineServicer(
                servicer, jobs, model=link.model, state=state, is_serving=lambda: server.is_serving
            )
            server.add_service(vllm_engine.SERVICE_NAME, vllm_engine.add_to_server, engine)
        for one in servers:
            await one.start()
        linked = asyncio.create_task(link.run(jobs))
        linked.add_done_callback(lambda _: signals.request())
        collecting = asyncio.create_task(_collect_when_idle(jobs, servers))
        await signals.wait()
        await _finish(link, jobs, config.grace_s)
        await asyncio.gather(*(one.stop(STOP_GRACE_S) for one in servers))
        collecting.cancel()
        linked.cancel()
        try:
            await linked
        except asyncio.CancelledError:
            return 0
        except CheckpointError as error:
            print(f"slipstream-gateway: {error}", file=sys.stderr)
            return 1
        finally:
            await jobs.journal.close()


def _interceptors(config: GatewayConfig) -> tuple[KeyInterceptor, ...]:
    """What looks at clients' calls first. Raises ConfigError for a file of keys that is wrong."""
    if config.api_keys is None:
        return ()
    return (KeyInterceptor(KeyFile(config.api_keys), max_streams=config.key_streams),)


async def _collect_when_idle(jobs: JobManager, servers: list[GrpcServer]) -> NoReturn:
    """Keeps full garbage collections out of the time with jobs or calls: with many streams they take 100 ms each."""
    collection = IdleCollection(keeps_young=True)
    with collection.in_charge():
        while True:
            if jobs.num_jobs or any(server.num_calls for server in servers):
                collection.worked()
            collection.collect_if_due()
            await asyncio.sleep(CHECK_INTERVAL_S)


async def _finish(link: SchedulerLink, jobs: JobManager, grace_s: float) -> None:
    """Refuses new jobs and gives the others time to end."""
    link.shut(UnavailableError("the server is shutting down", retry_after_ms=RETRY_AFTER_MS))
    try:
        async with asyncio.timeout(grace_s):
            await jobs.wait_idle()
    except TimeoutError:
        logger.warning("%d jobs did not finish within %.0f s", jobs.num_jobs, grace_s)
