"""Swaps of the draft of a running `slipstream up`, and its control service at `supervisor.sock`, which takes them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from slipstream.cli.cancellation import background, shielded
from slipstream.cli.models import NONE, ModelOptions
from slipstream.cli.process import ServiceReport
from slipstream.cli.up_config import scheduler_command, worker_command
from slipstream.common.errors import (
    ConfigError,
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from slipstream.common.rpc.address import SAME_HOST, UnixAddress
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.serving import GrpcServer
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.messages import decode, encode
from slipstream.common.wire.server import DraftSwap, SwapOutcome, SwapTerms
from slipstream.protos import scheduler_pb2_grpc, supervisor_pb2_grpc
from slipstream.protos import supervisor_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from slipstream.cli.service import Service
    from slipstream.cli.supervisor import Supervisor
    from slipstream.cli.up_config import UpConfig

logger = logging.getLogger(__name__)

DRAFT = "draft"
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Supervisor"].full_name
_SOCKET = "supervisor.sock"
_DESCRIBE_TIMEOUT_S = 2.0


class DraftSwaps:
    """Swaps the draft, once at a time. A client that goes away ends no swap."""

    def __init__(
        self,
        config: UpConfig,
        supervisor: Supervisor,
        on_log: Callable[[Path], None],
        check: Callable[[UpConfig], Awaitable[None]],
    ) -> None:
        """`config`: the configuration that `supervisor` runs. `on_log` is told of each new draft's log.

        `check` raises, before anything starts, for a draft that could not be served.
        """
        self._config = config
        self._supervisor = supervisor
        self._on_log = on_log
        self._check = check
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
        if config.models.has_draft:
            await self._check(config)
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
            end = f"the new draft {process.describe_end()} before it was ready; {process.end_of_log()}"
            raise FailedPreconditionError(end)

    def _taken_over(self, new: Service | None, config: UpConfig) -> Service | None:
        """Keeps the new draft, and a scheduler for it, from now on. Returns the old draft."""
        old = next((one for one in self._supervisor.services() if one.name == DRAFT), None)
        if old is not None:
            old.is_kept = False
        if new is not None:
            self._supervisor.keep(new, worker_command(config, DRAFT))
        self._supervisor.service("scheduler").command = scheduler_command(config)
        self._config = config
        return old


def control_address(state_dir: Path) -> str:
    """Address of the control service of an `up` with this state directory."""
    return str(UnixAddress(state_dir.absolute() / _SOCKET))


class SupervisorServicer(supervisor_pb2_grpc.SupervisorServicer):
    """Serves `Supervisor`."""

    def __init__(self, supervisor: Supervisor, swaps: DraftSwaps) -> None:
        self._supervisor = supervisor
        self._swaps = swaps

    async def Describe(self, request: pb.DescribeSupervisorRequest, context: Any) -> pb.SupervisorDescription:
        reject_unknown_fields(request)
        reports = [encode(pb.SupervisedService, service.report()) for service in self._supervisor.services()]
        return pb.SupervisorDescription(services=reports)

    async def SwapDraft(self, request: pb.SwapDraftModelRequest, context: Any) -> Any:
        reject_unknown_fields(request)
        draft = Path(request.draft) if request.draft else None
        outcome = await self._swaps.swap(draft, request.algorithm, decode(SwapTerms, request))
        return outcome.to_pb()


@asynccontextmanager
async def control_server(state_dir: Path, supervisor: Supervisor, swaps: DraftSwaps) -> AsyncIterator[None]:
    """Serves it until the context ends, and with it a swap that is under way."""
    with Listener.claim(control_address(state_dir), field="state_dir") as listener:
        server = GrpcServer(listener)
        servicer = SupervisorServicer(supervisor, swaps)
        server.add_service(SERVICE_NAME, supervisor_pb2_grpc.add_SupervisorServicer_to_server, servicer)
        await server.start()
        server.set_serving(True)
        try:
            yield
        finally:
            await swaps.close()
            await server.stop(0)


async def fetch_reports(state_dir: Path) -> list[ServiceReport]:
    """Asks the `up` with this state directory for its services; empty if none runs there."""
    if not (state_dir / _SOCKET).exists():  # gRPC would log a path that is too long for a socket
        return []
    async with grpc.aio.insecure_channel(control_address(state_dir)) as channel:
        stub = supervisor_pb2_grpc.SupervisorStub(channel)  # type: ignore[no-untyped-call]
        try:
            found = await stub.Describe(pb.DescribeSupervisorRequest(), timeout=_DESCRIBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return []
    return [decode(ServiceReport, service) for service in found.services]


async def request_swap(state_dir: Path, draft: Path | None, algorithm: str, terms: SwapTerms) -> SwapOutcome:
    """Has the `up` with this state directory swap the draft; the path is absolute.

    Raises UnavailableError if no `up` runs there, and otherwise as `Supervisor.SwapDraft` says in supervisor.proto.
    """
    request = encode(pb.SwapDraftModelRequest, terms, draft="" if draft is None else str(draft), algorithm=algorithm)
    async with grpc.aio.insecure_channel(control_address(state_dir)) as channel:
        stub = supervisor_pb2_grpc.SupervisorStub(channel)  # type: ignore[no-untyped-call]
        return await _outcome(stub.SwapDraft(request), lambda _: f"no `slipstream up` answers in {state_dir}")


async def swap_at(scheduler: str, swap: DraftSwap) -> SwapOutcome:
    """Has the scheduler at an address swap its draft. Raises as `Scheduler.SwapDraft` says in scheduler.proto."""
    async with grpc.aio.insecure_channel(scheduler, options=SAME_HOST.options()) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        return await _outcome(stub.SwapDraft(swap.to_pb()), lambda why: f"no scheduler answers at {scheduler}: {why}")


async def _outcome(call: Awaitable[Any], no_answer: Callable[[Exception], str]) -> SwapOutcome:
    try:
        return SwapOutcome.from_pb(await call)
    except grpc.aio.AioRpcError as error:
        found = error_from_rpc(error)
        if isinstance(found, ConnectionLostError):
            raise UnavailableError(no_answer(found)) from error
        raise found from error
