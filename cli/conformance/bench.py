"""A drafter under test: attaches it, calls it, and waits for it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.cli.conformance.scripted_verify import ContractError, ScriptedVerify
from slipstream.common.errors import SlipstreamError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.worker.step import Role
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.scheduler.workers.link import WorkerLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.common.device.interface import Device
    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.protos import worker_pb2 as pb
    from slipstream.scheduler.workers.link import LinkThread

REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
POLL_S = 0.01


class Bench:
    """Attaches one drafter, again and again."""

    def __init__(self, address: str, device: Device, thread: LinkThread, *, timeout_s: float) -> None:
        """`timeout_s`: the longest time that an answer or a step may take."""
        self.device = device
        self._address = address
        self._thread = thread
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address)
        self.stub: Any = pb_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def link(self) -> WorkerLink:
        """Makes a link as the scheduler has it."""
        return make_link(self._address, self._thread)

    def describe(self) -> WorkerDescription:
        """See the function."""
        return describe(self._address, self._thread)

    def health(self, name: str) -> int:
        """Returns the health of a service."""
        request = health_pb2.HealthCheckRequest(service=name)
        answer = health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=self._timeout_s)
        return answer.status  # type: ignore[no-any-return]

    def until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        """Waits until something is so. Raises ContractError if it is not in time."""
        deadline = time.monotonic() + self._timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                raise ContractError(f"{otherwise} for {self._timeout_s:g} s")
            time.sleep(POLL_S)

    @contextmanager
    def verify(self, *, run_ahead: int = 1) -> Iterator[ScriptedVerify]:
        """Memory for an attachment, which is not attached yet."""
        draft = self.describe()
        number = draft.last_epoch + 1
        verify = ScriptedVerify(self.device, draft, number, run_ahead=run_ahead, timeout_s=self._timeout_s)
        try:
            yield verify
        finally:
            verify.close()

    @contextmanager
    def attached(self, *, run_ahead: int = 1) -> Iterator[ScriptedVerify]:
        """An attachment. At its end the drafter must be free again."""
        with self.verify(run_ahead=run_ahead) as verify:
            link = self.link()
            is_over = False
            try:
                verify.attach(link)
                yield verify
                is_over = True
            finally:
                if not is_over:
                    verify.give_up()
                has_drained = link.detach(drain=is_over)
            if not has_drained:
                raise ContractError(f"Drain fails{f': {link.failure}' if link.failure else ''}")
            if unfinished := verify.unfinished():
                raise ContractError(f"Drain returns while {unfinished}")
            self.await_end()

    def await_end(self) -> None:
        """Waits until the drafter knows that its scheduler is gone. Raises ContractError."""
        self.until(lambda: not self.describe().has_scheduler, "has_scheduler is true after the end of Execute")

    def answers(self) -> bool:
        """Returns whether the drafter is still there."""
        try:
            self.describe()
        except SlipstreamError:
            return False
        return True

    def execute(self, commands: list[pb.StepCommand]) -> None:
        """Sends commands on a stream of their own, and reads what comes back. Raises grpc.RpcError."""
        list(self.stub.Execute(iter(commands), timeout=self._timeout_s))

    def must_refuse(self, what: str, call: Callable[[], object]) -> None:
        """Raises ContractError unless a call is refused, with one of REFUSALS."""
        accepted = " or ".join(code.name for code in REFUSALS)
        try:
            call()
        except grpc.RpcError as raised:
            error: Any = raised
            if error.code() not in REFUSALS:
                given = f"{error.code().name} ({error_from_rpc(error)})"
                raise ContractError(f"{what} is answered with {given}, not {accepted}") from None
        else:
            raise ContractError(f"{what} is taken, not refused with {accepted}")


def make_link(address: str, thread: LinkThread) -> WorkerLink:
    """Makes a link that nobody listens to."""
    return WorkerLink(Role.DRAFT, address, thread, on_failure=lambda: None)


def describe(address: str, thread: LinkThread) -> WorkerDescription:
    """Returns what the drafter at an address says of itself. Raises UnavailableError if it is not there."""
    link = make_link(address, thread)
    try:
        return link.describe()
    finally:
        link.detach(drain=False)
