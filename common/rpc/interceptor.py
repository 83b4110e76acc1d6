"""Interceptors of every server, and handlers that they wrap: errors become statuses, and calls are bounded."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import status_pb2
from grpc_status import rpc_status

from slipstream.common.errors import (
    RETRY_AFTER_MS,
    CancelledError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SlipstreamError,
)
from slipstream.common.rpc.loop_turns import LoopTurns
from slipstream.common.rpc.status import code_of, status_from_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

    from slipstream.common.rpc.metrics import RpcMetrics

    ServerInterceptor = object  # gRPC has no types of its own
    Continuation = Callable[[Any], Awaitable[Any]]
    Handle = Callable[[Any, Any], Awaitable[Any]]
else:
    ServerInterceptor = grpc.aio.ServerInterceptor

logger = logging.getLogger(__name__)

HEALTH_SERVICE = "grpc.health.v1.Health"

_METHOD_HANDLERS: dict[tuple[bool, bool], tuple[str, Callable[..., Any]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By (request streams, response streams)."""


def replaced(
    handler: Any,
    make: Callable[[Handle], Handle],
    *,
    is_raw: bool = False,
    passes_bytes: bool = False,
    reads_itself: bool = False,
) -> Any:
    """Returns a gRPC handler like `handler` that does what `make` makes of it.

    The function that `make` gets writes a stream's messages itself, and closes an asynchronous generator before it
    returns, so that its `finally` runs at once, also when the client has gone away. With `is_raw` requests arrive as
    bytes; with `passes_bytes` responses may be bytes. With `reads_itself` the function that `make` returns reads the
    request from the context, though it is no stream: gRPC receives no message before.
    """
    kind, make_handler = _METHOD_HANDLERS[handler.request_streaming, handler.response_streaming]
    behavior, serialize = getattr(handler, kind), handler.response_serializer
    if reads_itself:
        _, make_handler = _METHOD_HANDLERS[True, handler.response_streaming]

    def serialize_unless_bytes(response: Any) -> Any:
        return response if isinstance(response, bytes) or serialize is None else serialize(response)

    async def stream(request: Any, context: Any) -> None:
        answer = behavior(request, context)
        if not inspect.isasyncgen(answer):
            await answer
            return
        async with aclosing(answer):
            async for response in answer:
                await context.write(response)

    return make_handler(
        make(stream if handler.response_streaming else behavior),
        request_deserializer=None if is_raw else handler.request_deserializer,
        response_serializer=serialize_unless_bytes if passes_bytes else serialize,
    )


def refusing(handler: Any, error: SlipstreamError) -> Any:
    """Returns a handler that raises `error` in place of the call, without reading its message."""

    async def refuse(request: Any, context: Any) -> None:
        raise error.again()

    return replaced(handler, lambda _: refuse, is_raw=True)


class StatusInterceptor(ServerInterceptor):
    """Ends a call whose handler raises with the exception's status. Errors that are not ours are INTERNAL and logged.

    The first of a server's interceptors: it handles the errors of the others, too.
    """

    def __init__(self, metrics: RpcMetrics | None = None) -> None:
        self._metrics = metrics

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Wraps the handler of a call; None, for an unknown method, stays None."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        return None if handler is None else replaced(handler, lambda handle: partial(self._call, method, handle))

    async def _call(self, method: str, handle: Handle, request: Any, context: Any) -> Any:
        code = grpc.StatusCode.CANCELLED
        try:
            answer = await handle(request, context)
            code = grpc.StatusCode.OK
            return answer
        except grpc.aio.AbortError as abort:
            code = context.code()
            _forget_frames(abort)
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            # gRPC leaves the client waiting when a handler is cancelled by other code than gRPC.
            await _abort(context, status_from_error(CancelledError("the server gave the call up")))
        except grpc.aio.InternalError as error:
            # A write to a client that has gone away may raise this instead of a cancellation.
            raise asyncio.CancelledError from error
        except NotImplementedError:
            code = grpc.StatusCode.UNIMPLEMENTED
            await _abort(context, status_pb2.Status(code=code.value[0], message=f"{method} is not implemented"))
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            # A panic of a library in Rust is no Exception, but the client must hear of it too.
            told = _answer(method, error)
            code = code_of(told)
            await _abort(context, status_from_error(told))
            # The traceback refers to this frame, and would make a cycle.
            del told
        finally:
            if self._metrics is not None:
                self._metrics.count(method, code.name)


class CallLimit(ServerInterceptor):
    """Refuses calls beyond a number at a time with RESOURCE_EXHAUSTED; those that arrive together begin in turns.

    Health checks have room of their own, and do not wait.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self.num_calls = 0
        """Calls that are being served."""
        self._turns = LoopTurns()

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Wraps the handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None or is_health_check(handler_call_details):
            return handler
        return replaced(handler, self._counted)

    def _counted(self, handle: Handle) -> Handle:
        async def call(request: Any, context: Any) -> Any:
            if self.num_calls >= self._max_calls:
                message = f"{self._max_calls} calls are being served, and no more at a time"
                raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)
            self.num_calls += 1
            try:
                await self._turns.begin()
                return await handle(request, context)
            finally:
                self.num_calls -= 1

        return call


def is_health_check(handler_call_details: Any) -> bool:
    """True for the calls of the standard health service."""
    method: str = handler_call_details.method
    return method.startswith(f"/{HEALTH_SERVICE}/")


def undecodable(given: str) -> InvalidArgumentError:
    return InvalidArgumentError.described("request", f"got {given} that are no message of the method's type")


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _answer(method: str, error: BaseException) -> SlipstreamError:
    """Returns the error for the client. The traceback of an internal error goes to the log, and only there."""
    if isinstance(error, SlipstreamError) and code_of(error) is not grpc.StatusCode.INTERNAL:
        return error
    if isinstance(error, DecodeError):
        # Of a stream of requests, which gRPC decodes one by one.
        return undecodable("bytes")
    logger.error("%s failed", method, exc_info=error)
    return error if isinstance(error, SlipstreamError) else InternalError("an internal error; the log has more")


async def _abort(context: Any, status: status_pb2.Status) -> None:
    """Ends the call with a status, without the exception that gRPC raises for it."""
    grpc_status = rpc_status.to_status(status)
    try:
        await context.abort(grpc_status.code, grpc_status.details, grpc_status.trailing_metadata)
    except grpc.aio.AbortError as abort:
        _forget_frames(abort)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def _forget_frames(abort: BaseException) -> None:
    """The call keeps `abort`, and its frames would keep the call, the request and the handler's locals."""
    abort.__traceback__ = abort.__context__ = abort.__cause__ = None


MAX_NAMED_BYTES = 2**14
"""Unknown fields of a message that are longer together are refused by the message's name: listing them takes long."""


def reject_unknown_fields(message: Message, path: str = "") -> None:
    """Raises an InvalidArgumentError that names the path and number of an unknown field, also in nested messages."""
    known = message.__class__()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if message.ByteSize() > known.ByteSize():
        _name_unknown_field(message, known, path)


def _name_unknown_field(message: Message, known: Message, path: str) -> None:
    """Raises the error for a message that is longer than `known`, the same without its unknown fields."""
    num_bytes = message.ByteSize() - known.ByteSize()
    nested: list[tuple[str, Message, Message]] = []
    for (field, value), (_, known_value) in zip(message.ListFields(), known.ListFields(), strict=True):
        if field.message_type is not None:
            name = f"{path}.{field.name}" if path else field.name
            for (key, child), (_, known_child) in zip(
                _messages(field, value), _messages(field, known_value), strict=True
            ):
                if num_of_child := child.ByteSize() - known_child.ByteSize():
                    num_bytes -= num_of_child
                    nested.append((name + key, child, known_child))
    accepted = f"fields of {message.DESCRIPTOR.full_name} that this server knows"
    if num_bytes > MAX_NAMED_BYTES:
        raise InvalidArgumentError(path or "request", f"{num_bytes} bytes of unknown fields", accepted)
    unknown_fields: Any = UnknownFieldSet(message)
    for unknown in unknown_fields:
        number = unknown.field_number
        name = f"{path}.{number}" if path else str(number)
        raise InvalidArgumentError(name, f"unknown field number {number}", accepted)
    for name, child, known_child in nested:
        _name_unknown_field(child, known_child, name)


def _messages(field: FieldDescriptor, value: Any) -> Iterator[tuple[str, Message]]:
    """Yields the messages in a field's value, each with the index or key that its path has after the field's name."""
    kind: Any = field.message_type
    if kind.GetOptions().map_entry:
        if kind.fields_by_name["value"].message_type is not None:
            yield from ((f"[{key}]", child) for key, child in value.items())
    elif field.is_repeated:
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    else:
        yield "", value
