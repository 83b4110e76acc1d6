"""The gateways of one server to each other: what each of them is, and the jobs of all in one list."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import grpc.aio

from slipstream.common.errors import (
    RETRY_AFTER_MS,
    ConnectionLostError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
)
from slipstream.common.rpc.interceptor import ServerInterceptor, replaced
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.messages import decode, encode
from slipstream.common.wire.server import ServiceState
from slipstream.gateway.home import gateway_name
from slipstream.gateway.keys import act_for, client_of, current_owner
from slipstream.gateway.scheduler import channel_options
from slipstream.protos import generation_pb2, peers_pb2, peers_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.common.rpc.interceptor import Continuation, Handle
    from slipstream.gateway.home import Home
    from slipstream.gateway.jobs import JobManager

SERVICE_NAME = peers_pb2.DESCRIPTOR.services_by_name["Peers"].full_name
DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
CLIENT_KEY, OWNER_KEY = "slipstream-client", "slipstream-owner"
"""In the metadata of a call that a gateway forwards: the client, as `context.peer()` names it, and the key's name."""
_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class GatewayState:
    """A gateway, and its requests that wait for their first slot."""

    service: ServiceState
    num_waiting: int = 0


class Peers:
    """This gateway and the others of its server. Belongs to the event loop; an asynchronous context manager."""

    def __init__(
        self, home: Home, addresses: Sequence[str], jobs: JobManager, state: Callable[[], GatewayState]
    ) -> None:
        """`addresses`: the private ones of all gateways, in order; `jobs` and `state` are this gateway's own."""
        self.home = home
        self._jobs = jobs
        self._state = state
        self._addresses = addresses
        self._channels: dict[int, Any] = {}

    async def __aenter__(self) -> Self:
        for index, address in enumerate(self._addresses):
            if index != self.home.index:
                self._channels[index] = grpc.aio.insecure_channel(address, options=channel_options())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def channel(self, index: int) -> Any:
        """The channel to another gateway."""
        return self._channels[index]

    async def states(self) -> list[GatewayState]:
        """All gateways, in order; one that does not answer has the process id 0."""
        return list(await asyncio.gather(*(self._state_of(index) for index in range(self.home.count))))

    async def page(self, size: int, token: str) -> generation_pb2.ListJobsResponse:
        """Returns the next jobs of all gateways, the latest first.

        Raises InvalidArgumentError for an invalid size or token, UnavailableError if a gateway does not answer.
        """
        if not 0 <= size <= MAX_PAGE_SIZE:
            raise InvalidArgumentError("page_size", size, f"0 to {MAX_PAGE_SIZE}")
        if token and not (token.isascii() and token.isdigit() and len(token) < 20):
            raise InvalidArgumentError("page_token", token, "next_page_token of an answer, or nothing")
        size = size or DEFAULT_PAGE_SIZE
        # Numbers only grow, so jobs that come or go between two calls move no other to another page.
        before = int(token) if token else 0
        lists = await asyncio.gather(
            latest_jobs(self._jobs, size + 1, before),
            *(self._latest_of(index, size + 1, before) for index in self._channels),
        )
        found = sorted(chain(*lists), key=lambda numbered: numbered[0], reverse=True)
        next_page_token = str(found[size - 1][0]) if len(found) > size else ""
        return generation_pb2.ListJobsResponse(jobs=[job for _, job in found[:size]], next_page_token=next_page_token)

    async def _state_of(self, index: int) -> GatewayState:
        if index == self.home.index:
            return self._state()
        stub: Any = peers_pb2_grpc.PeersStub(self._channels[index])  # type: ignore[no-untyped-call]
        try:
            answer = await stub.DescribeGateway(peers_pb2.DescribeGatewayRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return GatewayState(ServiceState(name=gateway_name(index), address=self._addresses[index], pid=0))
        return GatewayState(decode(ServiceState, answer.service), answer.num_waiting)

    async def _latest_of(self, index: int, count: int, before: int) -> list[tuple[int, generation_pb2.Job]]:
        stub: Any = peers_pb2_grpc.PeersStub(self._channels[index])  # type: ignore[no-untyped-call]
        request = peers_pb2.ListHomeJobsRequest(max_jobs=count, before=before)
        try:
            metadata = (CLIENT_KEY, ""), (OWNER_KEY, current_owner())
            answer = await stub.ListHomeJobs(request, timeout=_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            found = error_from_rpc(error)
            # The deadline is this gateway's, not the client's.
            is_away = isinstance(found, ConnectionLostError | DeadlineExceededError)
            raise (_not_there(index) if is_away else found) from None
        return list(zip(answer.numbers, answer.jobs, strict=True))


async def latest_jobs(jobs: JobManager, count: int, before: int) -> list[tuple[int, generation_pb2.Job]]:
    """The caller's latest jobs at this gateway, with their numbers; other calls are served meanwhile."""
    found = []
    for job in jobs.latest(count, before):
        await jobs.turns.begin()
        found.append((job.number, job.info().to_pb()))
    return found


class PeersServicer(peers_pb2_grpc.PeersServicer):
    """Serves the other gateways."""

    def __init__(self, jobs: JobManager, state: Callable[[], GatewayState]) -> None:
        self._jobs = jobs
        self._state = state

    async def DescribeGateway(
        self, request: peers_pb2.DescribeGatewayRequest, context: Any
    ) -> peers_pb2.DescribeGatewayResponse:
        state = self._state()
        service = encode(generation_pb2.ServiceInfo, state.service)
        return peers_pb2.DescribeGatewayResponse(service=service, num_waiting=state.num_waiting)

    async def ListHomeJobs(
        self, request: peers_pb2.ListHomeJobsRequest, context: Any
    ) -> peers_pb2.ListHomeJobsResponse:
        found = await latest_jobs(self._jobs, request.max_jobs, request.before)
        numbers, jobs = [number for number, _ in found], [job for _, job in found]
        return peers_pb2.ListHomeJobsResponse(jobs=jobs, numbers=numbers)


def lost_peer(index: int, error: grpc.RpcError) -> UnavailableError | None:
    """The error for a client if a gateway did not answer; None if it did answer, with an error of its own."""
    if not isinstance(error_from_rpc(error), ConnectionLostError):
        return None
    return _not_there(index)


def _not_there(index: int) -> UnavailableError:
    return UnavailableError(f"{gateway_name(index)}, which keeps jobs, is not there", retry_after_ms=RETRY_AFTER_MS)


class FromPeers(ServerInterceptor):
    """Serves a call that another gateway forwarded as its client's. For private addresses alone: it checks no key."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Wraps the handler of such a call."""
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        if handler is None or CLIENT_KEY not in metadata:
            return handler

        def make(handle: Handle) -> Handle:
            async def call(request: Any, context: Any) -> Any:
                act_for(metadata[CLIENT_KEY], metadata[OWNER_KEY])
                return await handle(request, context)

            return call

        return replaced(handler, make)


def forwarding_metadata(context: Any) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call that this gateway forwards."""
    return (CLIENT_KEY, client_of(context)), (OWNER_KEY, current_owner())
