"""Our exceptions as gRPC statuses with `google.rpc` details, and back: the same error on both sides of a call."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from slipstream.common import errors
from slipstream.common.rpc.logs import escaped_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

DOMAIN = "slipstream"
DETAILS_KEY = "grpc-status-details-bin"
RETRY_KEY, UNSAFE = "retry", "unsafe"
"""In the metadata of an ErrorInfo of an UNAVAILABLE without RetryInfo: the call may not simply be made again."""

MAX_TEXT_BYTES = 1024
"""A status travels in the trailing metadata, of which gRPC takes 16 KiB, percent-encoded."""

CODES: dict[type[errors.SlipstreamError], grpc.StatusCode] = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CancelledError: grpc.StatusCode.CANCELLED,
    errors.FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ManifestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OrderingError: grpc.StatusCode.INTERNAL,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    errors.SlipstreamError: grpc.StatusCode.UNKNOWN,
}
"""A class that is not in the table takes the code of its nearest base that is."""

_UNSEEN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.CANCELLED.name)
"""Code and text of a call that a server's gRPC had taken and its event loop had not seen as the server stopped."""


def code_of(error: errors.SlipstreamError) -> grpc.StatusCode:
    """Returns the status code of an RPC that raises `error`."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def status_from_error(error: errors.SlipstreamError) -> status_pb2.Status:
    """Returns the status with its code, message and details."""
    status = status_pb2.Status(code=code_of(error).value[0], message=_clip(str(error)))
    info = error_details_pb2.ErrorInfo(reason=_reason(type(error)), domain=DOMAIN)
    if isinstance(error, errors.UnavailableError) and error.retry_after_ms is None:
        info.metadata[RETRY_KEY] = UNSAFE
    for detail in (info, *_details(error)):
        status.details.add().Pack(detail)
    return status


def error_from_rpc(error: grpc.RpcError) -> errors.SlipstreamError:
    """Returns the exception that the server raised, or the nearest one to the status of a failed call.

    Whatever the server says, the text of the error has no characters that act on a terminal.
    """
    call: Any = error
    return _error_of(call.code(), call.details(), _status_in(call.trailing_metadata()))


def error_from_status(encoded: bytes) -> errors.SlipstreamError:
    """Returns the exception of a google.rpc.Status. Raises DecodeError if it is none."""
    status = status_pb2.Status.FromString(encoded)
    return _error_of(_CODES_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN), status.message, status)


def _error_of(code: grpc.StatusCode, text: str | None, status: status_pb2.Status) -> errors.SlipstreamError:
    message = escaped_lines(text or code.name)
    info = error_details_pb2.ErrorInfo()
    is_ours = _unpack(status, info) and info.domain == DOMAIN
    kind = _FROM_REASON.get(info.reason) if is_ours else None
    if kind is None:
        kind = _FROM_CODE.get(code)
        # gRPC's own: a server that is unavailable says so in the details; a call that was cancelled here has a text.
        if not is_ours and (kind is errors.UnavailableError or (code, message) == _UNSEEN):
            kind = errors.ConnectionLostError
    return errors.InternalError(f"{code.name}: {message}") if kind is None else _build(kind, message, status)


def error_from_code(number: int, message: str, *, retry_after_ms: int | None = None) -> errors.SlipstreamError:
    """Returns the nearest exception to a code of google.rpc.Code that has no other detail than a time."""
    code = _CODES_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
    kind = _FROM_CODE.get(code)
    status = status_pb2.Status()
    if retry_after_ms is not None:
        status.details.add().Pack(_retry_info(retry_after_ms))
    return errors.InternalError(f"{code.name}: {message}") if kind is None else _build(kind, message, status)


def _details(error: errors.SlipstreamError) -> list[Message]:
    match error:
        case errors.InvalidArgumentError():
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=_clip(error.field), description=_clip(error.description)
            )
            return [error_details_pb2.BadRequest(field_violations=[violation])]
        case errors.ResourceExhaustedError() | errors.UnavailableError() if error.retry_after_ms is not None:
            return [_retry_info(error.retry_after_ms)]
        case errors.MismatchError():
            return [_precondition("MISMATCH", *error.differences[:8])]
        case errors.FailedPreconditionError():
            return [_precondition(_reason(type(error)), str(error))]
        case _:
            return []


def _retry_info(milliseconds: int) -> error_details_pb2.RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(milliseconds)
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _precondition(kind: str, *descriptions: str) -> error_details_pb2.PreconditionFailure:
    violations = [
        error_details_pb2.PreconditionFailure.Violation(type=kind, subject=DOMAIN, description=_clip(text, 512))
        for text in descriptions
    ]
    return error_details_pb2.PreconditionFailure(violations=violations)


def _build(kind: type[errors.SlipstreamError], message: str, status: status_pb2.Status) -> errors.SlipstreamError:
    if issubclass(kind, errors.InvalidArgumentError):
        request = error_details_pb2.BadRequest()
        _unpack(status, request)
        if not request.field_violations:
            return kind.described("request", message)
        violation = request.field_violations[0]
        return kind.described(escaped_lines(violation.field), escaped_lines(violation.description))
    if issubclass(kind, errors.ResourceExhaustedError | errors.UnavailableError):
        retry = error_details_pb2.RetryInfo()
        has_time = _unpack(status, retry)
        return kind(message, retry_after_ms=retry.retry_delay.ToMilliseconds() if has_time else None)
    if issubclass(kind, errors.MismatchError):
        failure = error_details_pb2.PreconditionFailure()
        _unpack(status, failure)
        return kind([escaped_lines(violation.description) for violation in failure.violations] or [message])
    return kind(message)


def _status_in(metadata: Any) -> status_pb2.Status:
    """Returns the details of a status; an empty status if there are none or they are no status."""
    for key, value in metadata or ():
        if key == DETAILS_KEY:
            with contextlib.suppress(DecodeError):
                return status_pb2.Status.FromString(value)
            break
    return status_pb2.Status()


def _unpack(status: status_pb2.Status, target: Message) -> bool:
    """Reads the detail of `target`'s kind into it. Returns whether there was one."""
    try:
        return any(detail.Is(target.DESCRIPTOR) and detail.Unpack(target) for detail in status.details)
    except DecodeError:
        return False


def _reason(kind: type[errors.SlipstreamError]) -> str:
    if issubclass(kind, errors.ConnectionLostError):
        # The server's own connection to another, not the caller's to it.
        kind = errors.UnavailableError
    name = kind.__name__.removesuffix("Error")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def _clip(text: str, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode()
    return encoded[: limit_bytes - 3].decode(errors="ignore") + "…"


# A ConfigError cannot be put together from a message, and is about the server's settings, not the client's.
_REBUILT = (
    *(kind for kind in CODES if not issubclass(kind, errors.ConfigError)),
    *(errors.DeviceError, errors.MismatchError, errors.StaleEpochError, errors.OutOfMemoryError),
    *(errors.PendingLengthError, errors.FutureMapError),
)
_FROM_REASON = {_reason(kind): kind for kind in _REBUILT}
_NOT_TOLD_APART = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_FROM_CODE: Mapping[grpc.StatusCode, type[errors.SlipstreamError]] = {
    # Reversed: of the kinds with the same code, the first one stands for it.
    **{code: kind for kind, code in reversed(CODES.items()) if code not in _NOT_TOLD_APART},
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgumentError,
    grpc.StatusCode.ABORTED: errors.FailedPreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: errors.FailedPreconditionError,
}
_CODES_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
