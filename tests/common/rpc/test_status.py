"""Exceptions to statuses and back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from slipstream.common import errors
from slipstream.common.rpc.status import CODES, DETAILS_KEY, code_of, error_from_rpc, status_from_error

EXAMPLES: list[errors.SlipstreamError] = [
    errors.InvalidArgumentError("sampling_params.top_p", 2.0, "above 0 to 1"),
    errors.UnauthenticatedError("no key"),
    errors.NotFoundError("no job 'a'"),
    errors.AlreadyExistsError("a job 'a' is alive"),
    errors.ResourceExhaustedError("the queue is full", retry_after_ms=1234),
    errors.UnavailableError("gone"),
    errors.UnavailableError("the workers are lost", retry_after_ms=500),
    errors.DeadlineExceededError("too long"),
    errors.CancelledError("on the way down"),
    errors.FailedPreconditionError("not attached"),
    errors.DeviceError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"),
    errors.MismatchError(["vocab_size: 1 and 2", "dtype: float32 and bfloat16"]),
    errors.StaleEpochError("epoch 1 is over"),
    errors.OutOfMemoryError("GPU memory: 2 MiB are needed"),
    errors.CheckpointError("no config.json"),
    errors.ManifestError("buffer out of bounds"),
    errors.OrderingError("a hole"),
    errors.PendingLengthError("not known yet"),
    errors.FutureMapError("twice"),
    errors.InternalError("an internal error"),
    errors.ResourceExhaustedError("too large", retry_after_ms=None),
    errors.SlipstreamError("something"),
]


def failed_call(status: status_pb2.Status, metadata: Any = None) -> grpc.aio.AioRpcError:
    """Returns the error that a client's call raises for a status."""
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    trailing = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString())) if metadata is None else metadata
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=status.message)


def detail(status: status_pb2.Status, kind: Any) -> Any:
    """The one detail of this kind."""
    (found,) = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    message = kind()
    found.Unpack(message)
    return message


def test_a_connection_that_a_server_lost_is_not_the_callers() -> None:
    arrived = error_from_rpc(failed_call(status_from_error(errors.ConnectionLostError("no draft"))))
    assert type(arrived) is errors.UnavailableError
    assert str(arrived) == "no draft"


@pytest.mark.parametrize(
    "error", [errors.InternalError, errors.UnavailableError, lambda text: errors.MismatchError([text])]
)
def test_what_a_server_says_does_not_act_on_a_terminal(error: Callable[[str], errors.SlipstreamError]) -> None:
    arrived = error_from_rpc(failed_call(status_from_error(error("red\x1b[31m\r\nand more"))))
    assert str(arrived).endswith("red\\x1b[31m\\r\nand more")


def test_a_field_does_not_act_on_a_terminal_either() -> None:
    arrived = error_from_rpc(failed_call(status_from_error(errors.InvalidArgumentError("a\x07", "b", "c"))))
    assert str(arrived) == "a\\x07: got 'b', accepted: c"


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was_raised(error: errors.SlipstreamError) -> None:
    arrived = error_from_rpc(failed_call(status_from_error(error)))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.__dict__ == error.__dict__


def test_every_exception_of_ours_has_a_code() -> None:
    def tree(kind: type[errors.SlipstreamError]) -> set[type[errors.SlipstreamError]]:
        return {kind}.union(*(tree(child) for child in kind.__subclasses__()))

    ours = {kind for kind in tree(errors.SlipstreamError) if kind.__module__ == errors.__name__}
    tried = {type(error) for error in EXAMPLES}
    tried |= {errors.ConfigError, errors.AddressInUseError, errors.ConnectionLostError}
    assert ours == tried
    assert set(CODES) <= ours


def test_a_setting_s_error_is_a_failed_precondition_to_clients() -> None:
    status = status_from_error(errors.AddressInUseError("listen", "a:1"))
    assert status.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert isinstance(error_from_rpc(failed_call(status)), errors.FailedPreconditionError)


def test_details_are_those_of_google_rpc() -> None:
    status = status_from_error(errors.InvalidArgumentError("input_ids.ids[3]", 99, "0 to 9"))
    violation = detail(status, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, violation.description) == ("input_ids.ids[3]", "got 99, accepted: 0 to 9")
    status = status_from_error(errors.ResourceExhaustedError("full", retry_after_ms=1500))
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500
    status = status_from_error(errors.StaleEpochError("over"))
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("STALE_EPOCH", "slipstream")
    assert detail(status, error_details_pb2.PreconditionFailure).violations[0].type == "STALE_EPOCH"


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_a_status_without_details_is_an_error_of_ours_too(code: grpc.StatusCode) -> None:
    status = status_pb2.Status(code=code.value[0], message="from a proxy")
    for metadata in (grpc.aio.Metadata(), grpc.aio.Metadata((DETAILS_KEY, b"\xff\xff not a status"))):
        error = error_from_rpc(failed_call(status, metadata))
        assert isinstance(error, errors.SlipstreamError)
        assert "from a proxy" in str(error)
        assert code_of(error) in (code, grpc.StatusCode.INTERNAL, *_NEAREST.get(code, ()))


_NEAREST = {
    grpc.StatusCode.OUT_OF_RANGE: (grpc.StatusCode.INVALID_ARGUMENT,),
    grpc.StatusCode.ABORTED: (grpc.StatusCode.FAILED_PRECONDITION,),
    grpc.StatusCode.UNIMPLEMENTED: (grpc.StatusCode.FAILED_PRECONDITION,),
}


def test_calls_that_a_stopping_server_has_not_seen_can_be_made_again() -> None:
    """Its gRPC has taken them, its event loop is busy, and then it stops."""
    is_busy, may_stop = threading.Event(), threading.Event()

    async def serve(port: Future[int]) -> None:
        server = grpc.aio.server()
        port.set_result(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        is_busy.set()
        may_stop.wait(30)
        await server.stop(0)

    with ThreadPoolExecutor(1) as pool:
        port: Future[int] = Future()
        served = pool.submit(asyncio.run, serve(port))
        with grpc.insecure_channel(f"127.0.0.1:{port.result(30)}") as channel:
            assert is_busy.wait(30)
            grpc.channel_ready_future(channel).result(30)
            calls = [channel.unary_unary("/a/b").future(b"") for _ in range(16)]
            may_stop.set()
            lost = [error_from_rpc(call.exception(30)) for call in calls]
        served.result(30)
    assert {type(error) for error in lost} == {errors.ConnectionLostError}


def test_a_call_that_was_cancelled_here_is_not_made_again() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.CANCELLED.value[0], message="Locally cancelled by application!")
    assert type(error_from_rpc(failed_call(status, grpc.aio.Metadata()))) is errors.CancelledError


def test_a_long_error_fits_into_metadata() -> None:
    for error in (
        errors.InvalidArgumentError("é" * 10_000, "ü" * 10_000, "ö" * 10_000),
        errors.MismatchError(["🤖" * 10_000] * 100),
        errors.StaleEpochError("🤖" * 10_000),
    ):
        status = status_from_error(error)
        # The message is percent-encoded, three bytes for one; the details in base64.
        assert 3 * len(status.message.encode()) + 4 * status.ByteSize() // 3 < 14_000


def test_an_unavailable_service_says_whether_the_call_may_be_made_again() -> None:
    safe = status_from_error(errors.UnavailableError("the workers are lost", retry_after_ms=1500))
    assert detail(safe, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500
    assert not detail(safe, error_details_pb2.ErrorInfo).metadata
    unsafe = status_from_error(errors.UnavailableError("the model changed"))
    assert detail(unsafe, error_details_pb2.ErrorInfo).metadata == {"retry": "unsafe"}
    assert not [packed for packed in unsafe.details if packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR)]
