"""The gateways of one server to each other: what each of them is, and the jobs of all in one list.

A call that names a job is forwarded to the gateway that keeps the job.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import grpc.aio
from google.protobuf.message import DecodeError

from slipstream.common.errors import (
    RETRY_AFTER_MS,
    ConnectionLostError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
)
from slipstream.common.rpc.interceptor import ServerInterceptor, replaced
from slipstream.common.rpc.loop_turns import LoopTurns
from slipstream.common.rpc.receive import MIN_COUNTED_BYTES, check_num_fields
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.messages import decode, encode
from slipstream.common.wire.server import ServiceState
from slipstream.gateway.config import gateway_name, shard_of
from slipstream.gateway.keys import act_for, client_of, current_owner, forwarded_for
from slipstream.gateway.scheduler import channel_options
from slipstream.protos import generation_pb2, peers_pb2, peers_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from slipstream.common.rpc.interceptor import Continuation, Handle
    from slipstream.common.rpc.receive import Incoming
    from slipstream.gateway.config import Shard
    from slipstream.gateway.jobs import JobManager
    from slipstream.gateway.stream import StreamWrites

SERVICE_NAME = peers_pb2.DESCRIPTOR.services_by_name["Peers"].full_name
DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
CLIENT_KEY, OWNER_KEY = "slipstream-client", "slipstream-owner"
"""In the metadata of a call that a gateway forwards: the client, as `context.peer()` names it, and the key's name."""
_TIMEOUT_S = 1.0
_NAMED_JOBS: Any = peers_pb2.NamedJobs.DESCRIPTOR
_GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
_ABORT = "/vllm.grpc.engine.VllmEngine/Abort"
"""Names any number of jobs, and has no effect on those that other gateways keep."""
_FORWARDED = {
    *(f"/{_GENERATION}/{name}" for name in ("Generate", "CreateJob", "WatchJob", "GetJob", "CancelJob")),
    *("/vllm.grpc.engine.VllmEngine/Generate", _ABORT),
}


@dataclass(frozen=True, slots=True)
class GatewayState:
    """A gateway, and its requests that wait for their first slot."""

    service: ServiceState
    num_waiting: int = 0


class Peers(peers_pb2_grpc.PeersServicer):
    """This gateway and the others of its server, whom it serves. An asynchronous context manager."""

    def __init__(
        self, shard: Shard, addresses: Sequence[str], jobs: JobManager, state: Callable[[], GatewayState]
    ) -> None:
        """`addresses`: the private ones of all gateways, in order; `jobs` and `state` are this gateway's own."""
        self.shard = shard
        self._jobs = jobs
        self._state = state
        self._addresses = addresses
        self._channels: dict[int, Any] = {}

    async def __aenter__(self) -> Self:
        for index, address in enumerate(self._addresses):
            if index != self.shard.index:
                self._channels[index] = grpc.aio.insecure_channel(address, options=channel_options())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def channel(self, index: int) -> Any:
        """Returns the channel to another gateway."""
        return self._channels[index]

    async def states(self) -> list[GatewayState]:
        """Returns all gateways, in order; one that does not answer has the process id 0."""
        return list(await asyncio.gather(*(self._state_of(index) for index in range(self.shard.count))))

    async def page(self, size: int, token: str) -> generation_pb2.ListJobsResponse:
        """Returns the next jobs of all gateways, the latest first.

        Raises InvalidArgumentError for an invalid size or token, UnavailableError if a gateway does not answer.
        """
        if not 0 <= size <= MAX_PAGE_SIZE:
            raise InvalidArgumentError("page_size", size, f"0 to {MAX_PAGE_SIZE}")
        if token and not (token.isascii() and token.isdigit() and len(token) < 20):
            raise InvalidArgumentError("page_token", token, "next_page_token of an answer, or nothing")
        size = size or DEFAULT_PAGE_SIZE
        # Numbers only grow, so jobs that begin or are forgotten between two calls move no other to another page.
        before = int(token) if token else 0
        lists = await asyncio.gather(
            self._latest(size + 1, before),
            *(self._latest_of(index, size + 1, before) for index in self._channels),
        )
        found = sorted(chain(*lists), key=lambda numbered: numbered[0], reverse=True)
        next_page_token = str(found[size - 1][0]) if len(found) > size else ""
        return generation_pb2.ListJobsResponse(jobs=[job for _, job in found[:size]], next_page_token=next_page_token)

    async def DescribeGateway(
        self, request: peers_pb2.DescribeGatewayRequest, context: Any
    ) -> peers_pb2.DescribeGatewayResponse:
        state = self._state()
        service = encode(generation_pb2.ServiceInfo, state.service)
        return peers_pb2.DescribeGatewayResponse(service=service, num_waiting=state.num_waiting)

    async def ListHomeJobs(
        self, request: peers_pb2.ListHomeJobsRequest, context: Any
    ) -> peers_pb2.ListHomeJobsResponse:
        found = await self._latest(request.max_jobs, request.before)
        numbers, jobs = [number for number, _ in found], [job for _, job in found]
        return peers_pb2.ListHomeJobsResponse(jobs=jobs, numbers=numbers)

    async def _latest(self, count: int, before: int) -> list[tuple[int, generation_pb2.Job]]:
        """Returns the caller's latest jobs at this gateway, with their numbers; other calls are served meanwhile."""
        found = []
        for job in self._jobs.latest(count, before):
            await self._jobs.turns.begin()
            found.append((job.number, job.info().to_pb()))
        return found

    async def _state_of(self, index: int) -> GatewayState:
        if index == self.shard.index:
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


def _not_there(index: int) -> UnavailableError:
    return UnavailableError(f"{gateway_name(index)}, which keeps jobs, is not there", retry_after_ms=RETRY_AFTER_MS)


class FromPeers(ServerInterceptor):
    """Serves a call that another gateway forwarded as its client's. Only for private addresses: it checks no key."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Wraps the handler of such a call."""
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        if handler is None or CLIENT_KEY not in metadata:
            return handler

        async def call(handle: Handle, request: Any, context: Any) -> Any:
            act_for(metadata[CLIENT_KEY], metadata[OWNER_KEY])
            return await handle(request, context)

        return replaced(handler, lambda handle: partial(call, handle))


def forwarding_metadata(context: Any) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call that this gateway forwards."""
    return (CLIENT_KEY, client_of(context)), (OWNER_KEY, current_owner())


class Forwarding(ServerInterceptor):
    """Forwards whole calls, and their answers back, without decoding them. Gets each message as an `Incoming`.

    The client's cancellation and deadline go along. While the other gateway is not there, a call is UNAVAILABLE.
    """

    def __init__(self, peers: Peers, writes: StreamWrites) -> None:
        """`writes`: those of this gateway's own streams as well."""
        self._peers = peers
        self._writes = writes
        self._turns = LoopTurns()
        self._num_calls = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Wraps the handler of a call that names a job."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method not in _FORWARDED:
            return handler
        call = partial(self._call, method, handler.response_streaming)
        return replaced(handler, lambda handle: partial(call, handle), passes_bytes=True)

    async def _call(self, method: str, is_stream: bool, handle: Handle, request: Incoming, context: Any) -> Any:
        if forwarded_for() is not None:
            return await handle(request, context)
        if len(request.data) >= MIN_COUNTED_BYTES:
            await check_num_fields(request.data, _NAMED_JOBS, self._turns)
        indices, own = self._keepers_of(method, request.data), self._peers.shard.index
        if indices == {own}:
            return await handle(request, context)
        if is_stream:
            (index,) = indices
            return await self._forwarded(index, self._forward_stream(index, method, request, context), context)
        data = request.data
        answer = await handle(request, context) if own in indices else None
        gone: UnavailableError | None = None
        for index in indices - {own}:
            try:
                answer = await self._forwarded(index, self._forward_unary(index, method, data, context), context)
            except UnavailableError as error:
                gone = error  # the others hear of their jobs nevertheless
        if gone is not None:
            raise gone
        return answer

    async def wait_idle(self) -> None:
        """Returns when no call is being forwarded."""
        await self._is_idle.wait()

    def _keepers_of(self, method: str, request: bytes) -> set[int]:
        """Returns the indices of the gateways that keep a request's jobs; it stays here without a readable job id."""
        try:
            # All of them have their ids under the same number; the rest is not looked at.
            job_ids = tuple(peers_pb2.NamedJobs.FromString(request).job_ids)
        except DecodeError:
            job_ids = ()
        # Of a field that is not repeated, the last one counts.
        named = [job_id for job_id in (job_ids if method == _ABORT else job_ids[-1:]) if job_id]
        return {shard_of(job_id, self._peers.shard.count) for job_id in named} or {self._peers.shard.index}

    async def _forwarded(self, index: int, answer: Awaitable[Any], context: Any) -> Any:
        self._num_calls += 1
        self._is_idle.clear()
        try:
            return await answer
        except grpc.aio.AioRpcError as error:
            if isinstance(error_from_rpc(error), ConnectionLostError):
                raise _not_there(index) from None
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._is_idle.set()

    async def _forward_unary(self, index: int, method: str, request: bytes, context: Any) -> Any:
        call = self._peers.channel(index).unary_unary(method)
        return await call(request, timeout=context.time_remaining(), metadata=forwarding_metadata(context))

    async def _forward_stream(self, index: int, method: str, request: Incoming, context: Any) -> None:
        # Written as a stream: it keeps its turn here until the other gateway receives it.
        call = self._peers.channel(index).stream_stream(method)(
            timeout=context.time_remaining(), metadata=forwarding_metadata(context)
        )
        try:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the status of the call says why
                await call.write(request.data)
                await call.done_writing()
            request.release()
            async with self._writes.bounding(context.write) as write:
                async for message in call:
                    await write(message)
        finally:
            call.cancel()
