"""Serves with everything in one process and on one stream, to compare with: the difference is the cost of three.

Loop, plan, batch, models and graphs are the services' own. Commands go straight to the engines, on the one thread that
owns the device, and nothing on the stream waits: what a wait would be for comes before it on the same stream.

    python -m slipstream.benchmarks.in_process SETTINGS LISTEN METRICS_PORT

SETTINGS is a pickled `InProcessSettings`, in hexadecimal.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import uvloop

from slipstream.cli.up_config import dialled
from slipstream.common.device.interface import Device
from slipstream.common.errors import ConfigError, SlipstreamError, UnavailableError
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.logs import configure_logging
from slipstream.common.rpc.metrics import LOOPBACK
from slipstream.common.wire.step import FenceOps, Role, StepCommand
from slipstream.common.wire.trace import HostRecords
from slipstream.common.wire.worker import Attachment, Measurements, OfferedRegion, WorkerDescription
from slipstream.scheduler.config import DISPATCH_ACKNOWLEDGED, SchedulerConfig
from slipstream.scheduler.link import Link
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import Engine


@dataclass(frozen=True, kw_only=True)
class InProcessSettings:
    """The settings of what would be scheduler, draft and verify."""

    verify: WorkerConfig
    draft: WorkerConfig | None
    scheduler: SchedulerConfig


def in_process_command(settings: InProcessSettings, listen: str, metrics_port: int) -> tuple[str, ...]:
    """The command line of a process that serves so."""
    module = (sys.executable, "-P", "-m", "slipstream.benchmarks.in_process")
    return (*module, pickle.dumps(settings).hex(), listen, str(metrics_port))


class LocalLink:
    """Stands in for `Link` with an engine of this process."""

    def __init__(self, engine: Engine, device_thread: Executor, failures: list[BaseException]) -> None:
        """`failures`: what broke the stream, as soon as it is broken."""
        self.role = engine.description.role
        self._engine = engine
        self._device_thread = device_thread
        self._failures = failures
        self._epoch = 0
        self.has_refused = False

    @property
    def failure(self) -> SlipstreamError | None:
        return UnavailableError(f"the stream is broken: {self._failures[0]!r}") if self._failures else None

    def describe(self) -> WorkerDescription:
        return self._device_thread.submit(self._engine.describe).result()

    def attach(self, attachment: Attachment) -> Measurements | None:
        measured = self._device_thread.submit(self._engine.attach, attachment).result()
        self._epoch = attachment.epoch
        return measured

    def attach_region(self, region: OfferedRegion) -> None:
        self._device_thread.submit(lambda: list(self._engine.attach_region(region))).result()

    def prepare(self, grammar: str) -> None:
        raise NotImplementedError("measured without constraints")

    def release_draft(self, epoch: int, attachment: int) -> None:
        self._device_thread.submit(self._engine.release_draft, epoch, attachment)

    def detach_draft(self, epoch: int, attachment: int) -> None:
        self._device_thread.submit(lambda: list(self._engine.detach_draft(epoch, attachment))).result()

    def send(self, command: StepCommand) -> None:
        if self.failure is not None:
            raise self.failure
        # Without the order that the stream has anyway; the scheduler looks at all that is signalled.
        command = replace(command, ops=FenceOps((), command.ops.signals))
        # Enqueued when this returns, as where one thread does everything.
        self._device_thread.submit(self._enqueue, command).result()

    def wait_for_acknowledgement(self, step: int, timeout_s: float) -> bool:
        """See `Link.wait_for_acknowledgement`: what was sent is enqueued."""
        if self.failure is not None:
            raise self.failure
        return True

    def read_records(self, from_step: int) -> HostRecords:
        """See `Link.read_records`. The scheduler's look at the clock is this process's, too."""
        log = self._engine.log
        return HostRecords(log.epoch, tuple(log.since(from_step)), None)

    def detach(self, *, drain: bool) -> bool:
        if drain and self.failure is None:
            self._device_thread.submit(self._engine.drain, self._epoch).result()
        self._device_thread.submit(self._engine.abandon, self._epoch).result()
        return drain and self.failure is None

    def _enqueue(self, command: StepCommand) -> None:
        try:
            self._engine.enqueue(command)
        except Exception as error:
            self._failures.append(error)


async def run_in_process(config: InProcessSettings, listener: Listener, metrics_port: int | None) -> int:
    """Loads the models, then serves as the scheduler does; returns the exit status."""
    import torch

    from slipstream.common.device.choose import choose_device
    from slipstream.scheduler.server import run_scheduler

    device = choose_device(config.scheduler.device, config.scheduler.fence)
    if config.verify.threads is not None:
        torch.set_num_threads(config.verify.threads)
    failures: list[BaseException] = []
    with ExitStack() as held:
        stream = device.create_stream("steps", failures.append)
        held.callback(stream.close)
        thread = held.enter_context(ThreadPoolExecutor(1, "device", stream.bind_thread))
        engines = await asyncio.get_running_loop().run_in_executor(thread, partial(_engines, config, device, stream))
        for engine in engines.values():
            held.callback(lambda close: thread.submit(close).result(), engine.close)
        return await run_scheduler(
            config.scheduler,
            listener,
            metrics_port,
            LOOPBACK,
            device=device,
            make_link=lambda role, _: cast("Link", LocalLink(engines[role], thread, failures)),
        )


def _engines(config: InProcessSettings, device: Device, stream: Any) -> dict[Role, Engine]:
    from slipstream.common.wire.events import EventLog
    from slipstream.services.factory import make_draft, make_verify
    from slipstream.services.worker.engine import Engine
    from slipstream.services.worker.server import end_at_once

    roles = [make_verify(config.verify, device, 0)]
    if config.draft is not None:
        roles.append(make_draft(config.draft, device, 0))
    make_engine = partial(Engine, refuses_waits=config.verify.debug_sync, on_stuck=end_at_once)
    return {role.description.role: make_engine(role, device, stream, EventLog()) for role in roles}


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    settings, listen, metrics_port = sys.argv[1:] if arguments is None else arguments
    try:
        configure_logging("in-process")
        config: InProcessSettings = pickle.loads(bytes.fromhex(settings))
        with Listener.claim(listen, field="listen") as listener:
            # The workers' addresses are this process's own: a question for them finds an answer.
            here = dialled(listener.address)
            draft = None if config.draft is None else here
            # As where waits are enqueued after their signals: no command holds what another one has to do first.
            ordered = replace(config.scheduler, verify=here, draft=draft, dispatch=DISPATCH_ACKNOWLEDGED)
            served = replace(config, scheduler=ordered)
            sys.exit(uvloop.run(run_in_process(served, listener, int(metrics_port))))
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
