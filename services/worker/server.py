"""A worker as a process: load, serve, and end when told to, or when the device is broken."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

import torch
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from slipstream.common.device.choose import choose_device
from slipstream.common.device.cpu.device import worker_threads
from slipstream.common.host import yield_to_streams
from slipstream.common.idle_collection import IdleCollection
from slipstream.common.rpc.metrics import BUILD_INFO, HOST_STALL_SECONDS, RpcMetrics, make_registry, serve_metrics
from slipstream.common.rpc.serving import GrpcServer
from slipstream.common.rpc.shutdown import ShutdownSignals
from slipstream.common.wire.command_socket import MAX_COMMAND_BYTES, CommandReceiver
from slipstream.common.wire.events import WORKER_STALLS, StreamName, make_log_directory, open_event_log
from slipstream.protos import trace_pb2_grpc
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.services.worker.device_thread import DeviceThread
from slipstream.services.worker.engine import Engine
from slipstream.services.worker.servicer import RECORDER, RecorderServicer, WorkerServicer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry

    from slipstream.common.device.interface import Device
    from slipstream.common.rpc.listener import Listener
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.step import Role
    from slipstream.services.worker.config import WorkerConfig
    from slipstream.services.worker.role import RoleEngine

    MakeRole = Callable[[WorkerConfig, Device, int], RoleEngine]

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.2
"""An Execute call never ends by itself; what it was sent is finished after it, by the engine."""
SWITCH_INTERVAL_S = 0.0005
"""The stream's thread computes in Python, too; a command must not wait 5 ms for its turn."""


async def run_worker(
    role: Role, config: WorkerConfig, listener: Listener, metrics_port: int | None, make_role: MakeRole
) -> int:
    """Serves until a signal; returns the exit status. `make_role` loads the model, on the device thread."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = choose_device(config.device)
    if device.has_stream_threads:
        yield_to_streams()
    torch.set_num_threads(config.threads or worker_threads())
    registry = make_registry()
    broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    with ExitStack() as held:
        signals = held.enter_context(ShutdownSignals())
        port = held.enter_context(serve_metrics(registry, metrics_port))
        # Closed in the opposite order: the thread releases what the stream waits for, and the stream writes the log.
        make_log_directory(config.access_log_dir)
        log = open_event_log(config.access_log_dir, StreamName(role.value), os.getpid())
        held.callback(log.close)
        stream = device.create_stream(role.value, _reporter(broken))
        held.callback(stream.close)
        device_thread = held.enter_context(DeviceThread(stream.bind_thread))
        loop = asyncio.get_running_loop()
        role_engine = await loop.run_in_executor(device_thread, make_role, config, device, port)
        engine = Engine(role_engine, device, stream, log, refuses_waits=config.debug_sync, on_stuck=end_at_once)
        _describe(registry, device, engine)
        collection, commands = IdleCollection(), CommandReceiver()
        servicer = WorkerServicer(
            engine,
            device_thread,
            commands=commands,
            acknowledge_done=config.acknowledge_done,
            on_command=collection.worked,
        )
        server = GrpcServer(
            listener,
            metrics=RpcMetrics(registry),
            find_fault=servicer.find_fault,
            max_receive_bytes=MAX_COMMAND_BYTES,
        )
        server.add_service("slipstream.v1.Worker", pb_grpc.add_WorkerServicer_to_server, servicer)
        recorder = RecorderServicer(log, device)
        server.add_service(RECORDER, trace_pb2_grpc.add_RecorderServicer_to_server, recorder)
        await server.start()
        held.callback(commands.close)
        if not config.acknowledge_done:
            commands.listen(server.address)
        held.enter_context(collection.in_charge())
        held.callback(asyncio.create_task(collection.run()).cancel)
        server.set_serving(True)
        logger.info("serving %s at %s", engine.description.model, server.address)
        broken.add_done_callback(lambda _: signals.request())
        await signals.wait()
        # A broken stream finishes no step: the scheduler learns of it when its call ends.
        await server.stop(0 if broken.done() else STOP_GRACE_S)
        await loop.run_in_executor(device_thread, engine.close)
        if broken.done():
            context = {"epoch": engine.last_epoch, "step": engine.last_step}
            logger.error("the %s stream is broken", role.value, exc_info=broken.result(), extra=context)
            return 1
    return 0


def end_at_once(engine: Engine, unmet: str) -> NoReturn:
    """Ends this process, whose stream waits for `unmet` and does not end; freeing anything would wait for it, too."""
    context = {"epoch": engine.last_epoch, "step": engine.last_step}
    logger.error(
        "the %s stream waits for what does not come, nor can be released, as when the process is gone that was to "
        "signal it (%s): this process ends at once, freeing nothing, and must be started again",
        engine.description.role.value,
        unmet,
        extra=context,
    )
    logging.shutdown()
    os._exit(1)


def _describe(registry: CollectorRegistry, device: Device, engine: Engine) -> None:
    worker = engine.description
    ordered_with = (device.fence_kind, "on" if worker.under_mps else "off", worker.algorithm)
    labels = (version("slipstream-serve"), worker.model, worker.device, *ordered_with)
    BUILD_INFO.gauge(registry).labels(worker.role.value, *labels).set(1)
    registry.register(_Stalls(engine.log, (*ordered_with, worker.role.value)))


class _Stalls(Collector):
    """The time that threads were blocked, read from the events at each scrape."""

    def __init__(self, log: EventLog, labels: tuple[str, ...]) -> None:
        """`labels`: fence, MPS, algorithm and service."""
        self._log = log
        self._labels = labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(HOST_STALL_SECONDS.name, HOST_STALL_SECONDS.help, labels=HOST_STALL_SECONDS.labels)
        for site in WORKER_STALLS:
            family.add_metric((*self._labels, site.name.lower()), self._log.stalled_ns[site] / 1e9)
        yield family


def _reporter(broken: asyncio.Future[BaseException]) -> Callable[[BaseException], None]:
    loop = asyncio.get_running_loop()

    def keep_first(error: BaseException) -> None:
        if not broken.done():
            broken.set_result(error)

    def report(error: BaseException) -> None:
        loop.call_soon_threadsafe(keep_first, error)

    return report
