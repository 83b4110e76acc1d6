"""A scheduler that serves gateways at a Unix socket, in this process; its workers are of this process, too."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self, cast

import grpc.aio

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.metrics import LOOPBACK
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import Refusal, SequenceSpec, StepOutput
from slipstream.common.wire.server import SchedulerState
from slipstream.common.wire.step import Role
from slipstream.protos import scheduler_pb2, scheduler_pb2_grpc
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.link import Link
from slipstream.scheduler.server import run_scheduler
from slipstream.services.worker.engine import RoleEngine
from tests.harness.counted_jobs import rows_of
from tests.harness.local_epoch import PATIENCE_MS
from tests.harness.local_grammar import LocalGrammar
from tests.harness.workers import ChangeCommand, LocalWorker, local_workers


class ServedScheduler:
    """A running scheduler."""

    def __init__(self, address: str, workers: list[LocalWorker], task: asyncio.Task[int]) -> None:
        self.address = address
        self.workers = workers
        self.task = task
        self.channel = grpc.aio.insecure_channel(address)
        self.stub: Any = scheduler_pb2_grpc.SchedulerStub(self.channel)  # type: ignore[no-untyped-call]

    async def stop(self) -> int:
        """Ends it as a supervisor does; returns the exit status."""
        if not self.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        return await self.task


@asynccontextmanager
async def served_scheduler(
    folder: Path,
    *roles: RoleEngine,
    grammars: LocalGrammar | None = None,
    log_dir: Path | None = None,
    before_send: ChangeCommand | None = None,
    device: Device | None = None,
    **settings: Any,
) -> AsyncIterator[ServedScheduler]:
    """Serves `roles`, verify first. `settings`: of `SchedulerConfig`; `grammars`: where that has a grammar worker.

    `log_dir`: scheduler, verify and draft log their accesses there. `before_send`: see `LocalWorker`. `device`: the
    roles'; None is the CPU.
    """
    device = device or HostDevice()
    draft = {"draft": "unix:/none", "fixed_draft_tokens": 4} if len(roles) > 1 else {}
    sizes = {"draft_timeout_ms": PATIENCE_MS, "context_tokens": 96, "slots": 4, "page_tokens": 4}
    config = SchedulerConfig(verify="unix:/none", access_log_dir=log_dir, **{**sizes, **draft, **settings})
    with (
        Listener.claim(f"unix:{folder}/scheduler.sock", field="listen") as listener,
        local_workers(*roles, log_dir=log_dir, device=device, before_send=before_send) as workers,
    ):
        links = cast("dict[Role, Link]", {worker.role: worker for worker in workers})

        def make_link(role: Role, _: str) -> Link:
            return cast("Link", grammars.link()) if grammars is not None and role is Role.GRAMMAR else links[role]

        serving = run_scheduler(config, listener, 0, LOOPBACK, device=device, make_link=make_link)
        task = asyncio.create_task(serving)
        served = ServedScheduler(listener.address, workers, task)
        with suppress(grpc.RpcError):
            await served.stub.Describe(scheduler_pb2.DescribeSchedulerRequest(), wait_for_ready=True, timeout=10)
        try:
            yield served
        finally:
            await served.channel.close()
            await served.stop()


class Gateway:
    """A gateway's end of a `Run` stream."""

    def __init__(self, served: ServedScheduler) -> None:
        self.call = served.stub.Run()
        self.states: list[SchedulerState] = []
        self.outputs: defaultdict[int, list[int]] = defaultdict(list)
        """By sequence."""
        self.ends: dict[int, FinishReason] = {}
        self.refused: dict[int, Refusal] = {}
        self.steps: list[StepOutput] = []
        self.error: grpc.RpcError | None = None
        self._is_over = False
        self._changed = asyncio.Condition()
        self._next_id = 1
        self._reading = asyncio.create_task(self._read())

    async def __aenter__(self) -> Self:
        await self.until(lambda: bool(self.states))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    @property
    def epoch(self) -> int:
        """The epoch of the last state that serves."""
        return next(state.serving.server.epoch for state in reversed(self.states) if state.serving is not None)

    async def attached(self) -> None:
        """Returns when sequences can run."""
        await self.until(lambda: self.states[-1].serving is not None)

    async def submit(self, *specs: SequenceSpec, epoch: int | None = None) -> list[int]:
        """Submits sequences; returns their ids."""
        ids = list(range(self._next_id, self._next_id + len(specs)))
        self._next_id += len(specs)
        self.outputs |= {number: [] for number in ids}
        messages = [spec.to_pb(number, epoch or self.epoch) for number, spec in zip(ids, specs, strict=True)]
        await self.call.write(scheduler_pb2.RunRequest(sequences=messages))
        return ids

    async def cancel(self, *ids: int) -> None:
        """Cancels sequences."""
        await self.call.write(scheduler_pb2.RunRequest(cancelled=ids))

    async def run(self, *specs: SequenceSpec) -> list[list[int]]:
        """Runs sequences to their end; returns their new tokens."""
        ids = await self.submit(*specs)
        await self.until(lambda: all(number in self.ends for number in ids))
        return [self.outputs[number] for number in ids]

    async def until(self, is_true: Any, timeout_s: float = 60.0) -> None:
        """Returns when something holds; looks after each message, and at the end of the stream."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: is_true() or self._is_over)
        if not is_true():
            await self._reading
            raise AssertionError(f"the stream ended before: {self.error!r}")

    async def _read(self) -> None:
        try:
            async for message in self.call:
                async with self._changed:
                    self._take(message)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.error = error
        finally:
            self._is_over = True
            async with self._changed:
                self._changed.notify_all()

    def _take(self, message: scheduler_pb2.RunResponse) -> None:
        if message.HasField("state"):
            self.states.append(SchedulerState.from_pb(message.state))
        self.refused |= {refusal.sequence: Refusal.from_pb(refusal) for refusal in message.refusals}
        if message.HasField("output"):
            output = StepOutput.from_pb(message.output)
            self.steps.append(output)
            for row in rows_of(output):
                assert row.sequence not in self.ends, "nothing comes after the end"
                self.outputs[row.sequence] += row.tokens
                if row.finish_reason is not None:
                    self.ends[row.sequence] = row.finish_reason
