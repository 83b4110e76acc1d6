"""Forwards a call that names a job to the gateway that the job is at home at."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from slipstream.common.errors import UnavailableError
from slipstream.common.rpc.interceptor import ServerInterceptor, replaced
from slipstream.common.rpc.loop_turns import LoopTurns
from slipstream.common.rpc.receive import MIN_COUNTED_BYTES, check_num_fields
from slipstream.gateway.home import home_of
from slipstream.gateway.keys import forwarded_for
from slipstream.gateway.peers import forwarding_metadata, lost_peer
from slipstream.gateway.service import SERVICE_NAME
from slipstream.protos.peers_pb2 import NamedJobs

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from slipstream.common.rpc.interceptor import Continuation, Handle
    from slipstream.common.rpc.receive import Incoming
    from slipstream.gateway.peers import Peers
    from slipstream.gateway.stream import StreamWrites

_NAMED_JOBS: Any = NamedJobs.DESCRIPTOR
_ABORT = "/vllm.grpc.engine.VllmEngine/Abort"
"""Names any number of jobs, and has no effect on those that are not at home."""
_FORWARDED = {
    *(f"/{SERVICE_NAME}/{name}" for name in ("Generate", "CreateJob", "WatchJob", "GetJob", "CancelJob")),
    *("/vllm.grpc.engine.VllmEngine/Generate", _ABORT),
}


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

        def make(handle: Handle) -> Handle:
            async def call(request: Incoming, context: Any) -> Any:
                if forwarded_for() is not None:
                    return await handle(request, context)
                if len(request.data) >= MIN_COUNTED_BYTES:
                    await check_num_fields(request.data, _NAMED_JOBS, self._turns)
                homes, home = self._homes(method, request.data), self._peers.home.index
                if homes == {home}:
                    return await handle(request, context)
                if handler.response_streaming:
                    (index,) = homes
                    return await self._forwarded(index, self._forward_stream(index, method, request, context), context)
                data = request.data
                answer = await handle(request, context) if home in homes else None
                gone: UnavailableError | None = None
                for index in homes - {home}:
                    try:
                        answer = await self._forwarded(
                            index, self._forward_unary(index, method, data, context), context
                        )
                    except UnavailableError as error:
                        gone = error  # the others hear of their jobs nevertheless
                if gone is not None:
                    raise gone
                return answer

            return call

        return replaced(handler, make, passes_bytes=True)

    async def wait_idle(self) -> None:
        """Returns when no call is being forwarded."""
        await self._is_idle.wait()

    def _homes(self, method: str, request: bytes) -> set[int]:
        """Returns the indices of the gateways that a request belongs to; it stays here without a readable job id."""
        try:
            # All of them have their ids under the same number; the rest is not looked at.
            job_ids = tuple(NamedJobs.FromString(request).job_ids)
        except DecodeError:
            job_ids = ()
        # Of a field that is not repeated, the last one counts.
        named = [job_id for job_id in (job_ids if method == _ABORT else job_ids[-1:]) if job_id]
        return {home_of(job_id, self._peers.home.count) for job_id in named} or {self._peers.home.index}

    async def _forwarded(self, index: int, answer: Awaitable[Any], context: Any) -> Any:
        self._num_calls += 1
        self._is_idle.clear()
        try:
            return await answer
        except grpc.aio.AioRpcError as error:
            lost = lost_peer(index, error)
            if lost is not None:
                raise lost from None
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
