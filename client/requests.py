"""What both clients send, and how they read what comes back."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import grpc

from slipstream.common.chunk import Chunk
from slipstream.common.errors import ConnectionLostError, InternalError, InvalidArgumentError, ResourceExhaustedError
from slipstream.common.keepalive import Keepalive
from slipstream.common.status import error_from_rpc
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slipstream.common.keepalive import ChannelOption

RECONNECT_S = 30.0
"""How long a client tries to get a lost connection back, unless it is told otherwise."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

_Request = TypeVar("_Request")


class SamplingOptions(TypedDict, total=False):
    """How to continue a prompt. The fields of `SamplingParams` in generation.proto; None takes the server's default."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool


def channel_options(keepalive: Keepalive | None) -> list[ChannelOption]:
    """The arguments of a client's channel."""
    pauses: list[ChannelOption] = [
        ("grpc.initial_reconnect_backoff_ms", int(1000 * FIRST_PAUSE_S)),
        ("grpc.min_reconnect_backoff_ms", int(1000 * FIRST_PAUSE_S)),
        ("grpc.max_reconnect_backoff_ms", int(1000 * LONGEST_PAUSE_S)),
    ]
    return [*(keepalive or Keepalive()).options(), *pauses, ("grpc.max_receive_message_length", -1)]


def new_job_id() -> str:
    """A name that no other job has."""
    return uuid.uuid4().hex


def job_request(kind: type[_Request], prompt: str | Sequence[int], job_id: str, sampling: SamplingOptions) -> _Request:
    """A GenerateRequest or a CreateJobRequest. Raises InvalidArgumentError for what does not fit its field's type."""
    params = build(generation_pb2.SamplingParams, **sampling)
    if isinstance(prompt, str):
        return build(kind, job_id=job_id, text=prompt, sampling_params=params)
    return build(kind, job_id=job_id, input_ids=build(generation_pb2.TokenIds, ids=prompt), sampling_params=params)


def build(kind: type[_Request], **values: Any) -> _Request:
    """A message; what does not fit its field's type is refused as the server would, but for the name of the field."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        given = {name: value for name, value in values.items() if value is not None}
        raise InvalidArgumentError(kind.__name__, given, f"what generation.proto says ({error})") from error


@contextmanager
def our_errors() -> Iterator[None]:
    """Raises the error of a failed call as the server raised it."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


class OutputReader:
    """Reads the messages of one job's output, over any number of calls, and sees to it that none is left out."""

    def __init__(self, from_token: int = 0) -> None:
        self.num_tokens = from_token
        """Tokens so far, those before the first message included: where the next call must go on."""
        self.is_over = False

    def read(self, message: generation_pb2.GenerateResponse) -> Chunk:
        """The next part. Raises InternalError when the server left out or repeated tokens."""
        chunk = Chunk.from_pb(message)
        if chunk.token_offset != self.num_tokens:
            raise InternalError(f"token {self.num_tokens} was expected, token {chunk.token_offset} came")
        self.num_tokens += len(chunk.token_ids)
        self.is_over = chunk.finish_reason is not None
        return chunk

    def check_end(self) -> None:
        """Raises ConnectionLostError when the stream ended before the job did."""
        if not self.is_over:
            raise ConnectionLostError("the stream ended before the job did")


RETRIED = (ConnectionLostError, ResourceExhaustedError)
"""What a call that watches a job can be made again after: the second is for those who did not read for a while."""


class Reconnection:
    """How long, and how often, to try again. Begins anew whenever something came through."""

    def __init__(self, reconnect_s: float, timeout_s: float | None) -> None:
        """Tries for `reconnect_s` after a failure; all calls together take `timeout_s` at most."""
        self._reconnect_s = reconnect_s
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost_at: float | None = None
        self._pause_s = FIRST_PAUSE_S

    @property
    def time_left_s(self) -> float | None:
        """For the deadline of the next call."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def came_through(self) -> None:
        """The connection works."""
        self._lost_at, self._pause_s = None, FIRST_PAUSE_S

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait before the next try. Raises the error when there should be none."""
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        if now + pause_s > self._lost_at + self._reconnect_s:
            raise error
        return pause_s if self.time_left_s is None else min(pause_s, self.time_left_s)
