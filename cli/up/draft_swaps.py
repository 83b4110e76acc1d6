"""Swaps the draft of a running `slipstream up`: a new service beside the old one, of which one is ended."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc.aio

from slipstream.cli.cancellation import background, shielded
from slipstream.cli.model_choice import NONE, ModelOptions
from slipstream.cli.up.config import scheduler_command, worker_command
from slipstream.common.api.draft_swap import DraftSwap, SwapOutcome, SwapTerms
from slipstream.common.errors import (
    ConfigError,
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from slipstream.common.rpc.keepalive import SAME_HOST
from slipstream.common.rpc.status import error_from_rpc
from slipstream.protos import scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slipstream.cli.up.config import UpConfig
    from slipstream.cli.up.service import Service
    from slipstream.cli.up.supervisor import Supervisor

logger = logging.getLogger(__name__)

DRAFT = "draft"


class DraftSwaps:
    """One swap at a time. A client that goes away does not end it."""

    def __init__(
        self, config: UpConfig, supervisor: Supervisor, on_log: Callable[[Path], None] = lambda _path: None
    ) -> None:
        """`config`: what `supervisor` was started with. `on_log` is told of each new draft's log."""
        self._config = config
        self._supervisor = supervisor
        self._on_log = on_log
        self._num_started = 1
        self._task: asyncio.Task[SwapOutcome] | None = None

    async def swap(self, draft: Path | None, algorithm: str, terms: SwapTerms) -> SwapOutcome:
        """Raises as `Supervisor.SwapDraft` says in supervisor.proto."""
        if self._task is not None:
            raise FailedPreconditionError("another swap of the draft is under way")
        config = self._with_draft(draft, algorithm, terms)
        self._task = asyncio.create_task(self._swap(config, terms))
        self._task.add_done_callback(self._on_end)
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """Ends a swap that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_end(self, task: asyncio.Task[SwapOutcome]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("the draft was not swapped: %s", error)

    def _with_draft(self, draft: Path | None, algorithm: str, terms: SwapTerms) -> UpConfig:
        models = self._config.models
        if algorithm == NONE and not models.has_draft:
            raise FailedPreconditionError("there is no draft to take away")
        try:
            chosen = ModelOptions(
                target=models.target, draft=draft, algorithm=algorithm, num_draft_tokens=terms.num_draft_tokens
            ).choose()
            self._num_started += 1
            # A scheduler that starts again goes on as this one: the draft may rest as before.
            return replace(
                self._config,
                models=replace(chosen, num_draft_tokens=models.num_draft_tokens),
                swapped_draft_tokens=terms.num_draft_tokens,
                draft_instance=f"{DRAFT}-{self._num_started}",
            )
        except ConfigError as error:
            description = str(error).removeprefix(f"{error.field}: ")
            raise InvalidArgumentError.described(error.field, description) from error

    async def _swap(self, config: UpConfig, terms: SwapTerms) -> SwapOutcome:
        new = self._start(config)
        try:
            if new is not None:
                await self._until_ready(new)
            address = "" if new is None else new.command.address
            outcome = await swap_at(self._config.socket("scheduler"), DraftSwap(address=address, terms=terms))
        except BaseException as error:
            if new is not None:
                await shielded(self._supervisor.retire(new), during=error)
            raise
        leaving = self._taken_over(new, config) if not outcome.rolled_back else new
        if leaving is not None:
            await self._supervisor.retire(leaving)
        return outcome

    def _start(self, config: UpConfig) -> Service | None:
        if not config.models.has_draft:
            return None
        # At a free port until the old one has left its own.
        command = worker_command(replace(config, metrics_port=0), DRAFT)
        new = self._supervisor.start_beside(replace(command, name=config.draft_instance))
        self._on_log(command.log_path)
        return new

    async def _until_ready(self, new: Service) -> None:
        process = new.process
        async with background(process.ready.wait(), process.ended.wait()) as waits:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not process.ready.is_set():
            log = f"the end of its log ({process.command.log_path}):\n{process.last_log_lines()}"
            raise FailedPreconditionError(f"the new draft {process.describe_end()} before it was ready; {log}")

    def _taken_over(self, new: Service | None, config: UpConfig) -> Service | None:
        """Has the new one, and a scheduler for it, started again from now on. Returns the old one."""
        old = next((one for one in self._supervisor.services() if one.name == DRAFT), None)
        if old is not None:
            old.is_kept = False
        if new is not None:
            self._supervisor.keep(new, worker_command(config, DRAFT))
        self._supervisor.service("scheduler").command = scheduler_command(config)
        self._config = config
        return old


async def swap_at(scheduler: str, swap: DraftSwap) -> SwapOutcome:
    """Has the scheduler at an address swap its draft. Raises as `Scheduler.SwapDraft` says in scheduler.proto."""
    async with grpc.aio.insecure_channel(scheduler, options=SAME_HOST.options()) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        try:
            return SwapOutcome.from_pb(await stub.SwapDraft(swap.to_pb()))
        except grpc.aio.AioRpcError as error:
            found = error_from_rpc(error)
            if isinstance(found, ConnectionLostError):
                raise UnavailableError(f"no scheduler answers at {scheduler}: {found}") from error
            raise found from error
