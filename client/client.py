"""Clients of the `Generation` service: `AsyncClient`, and `Client` for programs without an event loop.

All that they do is in the coroutines of `AsyncClient`. Those of a `Client` block where the others wait, so that each is
over as soon as it has been begun.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.client.connection import open_async_channel, open_channel, with_key
from slipstream.client.delivery import Delivery
from slipstream.client.requests import (
    RECONNECT_S,
    FirstContact,
    OutputReader,
    Reconnection,
    build,
    channel_options,
    detokenize_request,
    job_request,
    tokenize_request,
)
from slipstream.common.errors import (
    ConfigError,
    FailedPreconditionError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.address import CONNECT_TIMEOUT_S
from slipstream.common.wire.job import JobInfo, JobPage
from slipstream.common.wire.server import ServerState
from slipstream.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
    from typing import Unpack

    from slipstream.client.connection import AccessOptions
    from slipstream.client.requests import ChatOptions, Prompt, RequestOptions
    from slipstream.common.rpc.address import Keepalive
    from slipstream.common.wire.job import OutputChunk

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

MOVE_TIMEOUT_S = 1.0
"""Longest wait for another server to say that it serves."""


class _Server:
    """A server's address, with the connection to it."""

    def __init__(self, channel: Any, contact: FirstContact) -> None:
        self.contact = contact
        self.channel = channel
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        self.num_outputs = 0
        """Outputs that the client reads."""
        self.delivery: Delivery | None = None


@dataclass(slots=True)
class _Output:
    """A job's output, for which a client makes as many calls as it takes."""

    server: _Server
    method: str
    next_request: Callable[[], Any]
    reader: OutputReader
    retry: Reconnection
    request: generation_pb2.GenerateRequest | None = None
    """Set if it may go on at another server."""

    def call(self) -> Any:
        """Makes the next call, for the output that has not arrived yet."""
        return getattr(self.server.stub, self.method)(self.next_request(), timeout=self.retry.time_left_s)

    def pause_after(self, error: SlipstreamError) -> float:
        """Returns the seconds to wait before the next call. Raises the error if there should be none."""
        if self.request is not None and isinstance(error, FailedPreconditionError) and self.reader.has_attempt:
            # Behind this address there is a server that does not know the job.
            self.move(self.server)
            return 0.0
        can_wait = self.request is not None and self.reader.has_output
        return self.retry.pause_after(error, can_wait=can_wait)

    def move(self, server: _Server) -> None:
        """Has the next call go on at a server that does not know the job."""
        assert self.request is not None, "only such an output moves"
        self.server, self.retry.contact = server, server.contact
        self.reader.continued(self.request)

    def read(self, message: Any) -> OutputChunk | None:
        """Reads a call's next message."""
        chunk = self.reader.read(message)
        if chunk is not None:
            self.retry.on_message()
        return chunk


class AsyncClient:
    """One connection to a server. Errors are those of `slipstream.common.errors`, as the server raised them.

    >>> async with AsyncClient("127.0.0.1:50051") as client:
    ...     async for chunk in client.generate("Once upon a time", max_new_tokens=64):
    ...         print(chunk.text, end="")

    A conversation, for a model that has a chat template:

    >>>     messages = [{"role": "user", "content": "Who was first?"}]
    ...     async for chunk in client.generate(messages, stop="\\n\\n"):
    ...         print(chunk.text, end="")

    A job that outlives its connection, and the client:

    >>>     job = await client.create_job("Once upon a time", job_id="tale")
    ...     async for chunk in client.watch_job("tale"):
    ...         print(chunk.text, end="")
    """

    # `Client` has others of these, which block.
    _open_channel: Callable[..., Any] = staticmethod(open_async_channel)
    _sleep: Callable[[float], Coroutine[Any, Any, None]] = staticmethod(asyncio.sleep)

    @staticmethod
    async def _answer_of(call: Any) -> Any:
        return await call

    @staticmethod
    def _messages_of(call: Any) -> Any:
        return call

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        together_from: int | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keepalive: Keepalive | None = None,
        **access: Unpack[AccessOptions],
    ) -> None:
        """`address`: HOST:PORT, unix:PATH, or with a scheme of gRPC's, as dns:///HOST:PORT; or a list of them.

        Given a list, `generate` goes on at another address that serves when its server is gone; also at the same one,
        where another server may be. All other calls are made to the first address: a job stays with its server.

        Connects with the first call; make an `AsyncClient` on its event loop. A server that has not answered any call
        yet is tried again for `connect_timeout_s` by `generate`, `create_job` and `watch_job`; then, and by all other
        calls at once, ConnectionLostError is raised with the address. `access`: an API key, and TLS. Raises ConfigError
        for what is no address, and for files that cannot be used.

        `together_from`: while so many outputs of `generate` arrive, further ones arrive together, on one stream, which
        takes less work for each. None: each on a stream of its own.
        """
        self._moves = not isinstance(address, str)
        addresses = [address] if isinstance(address, str) else address
        if not addresses:
            raise ConfigError("address", addresses, "at least one address")
        self._servers = [
            _Server(
                self._open_channel(one, channel_options(one, keepalive, connect_timeout_s), access),
                FirstContact(one, connect_timeout_s),
            )
            for one in addresses
        ]
        self._latest = self._servers[0]
        """Where the latest `generate` went on."""
        self._contact, self._stub = self._servers[0].contact, self._servers[0].stub
        self._together_from = together_from

    def with_key(self, api_key: str) -> Self:
        """Returns a client of the same connection whose calls send another API key. Raises ConfigError for no key."""
        other = copy(self)
        other._servers = [_Server(with_key(server.channel, api_key), server.contact) for server in self._servers]
        other._latest, other._stub = other._servers[0], other._servers[0].stub
        return other

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every call on it, also those of other threads."""
        for server in self._servers:
            if server.delivery is not None:
                await asyncio.wait([server.delivery.close()])
            await self._answer_of(server.channel.close())

    def generate(
        self,
        prompt: Prompt,
        *,
        job_id: str = "",
        timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[OutputChunk, None]:
        """Continues a text or token ids, or answers a conversation, and yields the output as it arrives.

        Closing the generator cancels the job. Parameters are those of generation.proto; None takes the server's
        default. With `n` samples each chunk names its sample; the last of all has the `job_usage`. After `timeout_s`
        the job ends with DeadlineExceededError. A lost connection is made again for `reconnect_s`, and the output goes
        on with the next token. Raises InternalError when the server left out or repeated tokens.
        """
        request = job_request(generation_pb2.GenerateRequest, prompt, job_id, options)
        reader, retry = OutputReader(keeps_tokens=self._moves), Reconnection(self._contact, reconnect_s, timeout_s)
        output = _Output(self._latest, "Generate", lambda: reader.resumed(request), reader, retry)
        if self._moves:
            output.request, retry.contact = request, self._latest.contact
            if not request.sampling_params.HasField("seed"):
                # Another server would draw another one.
                request.sampling_params.seed = secrets.randbits(64)
        return self._follow(output)

    async def create_job(
        self,
        prompt: Prompt,
        *,
        job_id: str = "",
        timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RequestOptions],
    ) -> JobInfo:
        """Creates a job that goes on without this client. `timeout_s` is for the call.

        Sent again for `reconnect_s` when the connection breaks, or the server is away and says that it will return: the
        job's name, given or drawn here, makes that safe.
        Raises AlreadyExistsError when another request has made a job of this name.
        """
        request = job_request(generation_pb2.CreateJobRequest, prompt, job_id or uuid.uuid4().hex, options)
        retry = Reconnection(self._contact, reconnect_s, timeout_s)
        while True:
            try:
                return JobInfo.from_pb((await self._ask("CreateJob", request, retry.time_left_s)).job)
            except SlipstreamError as error:
                await self._sleep(retry.pause_after(error))

    def watch_job(
        self,
        job_id: str,
        from_token: int | Sequence[int] = 0,
        *,
        attempt: int = 0,
        timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> AsyncGenerator[OutputChunk, None]:
        """Yields a job's output from a token on, up to its end; closing the generator leaves the job as it is.

        With several samples, `from_token` may be a number for each, in order; samples without one begin at 0. Raises
        FailedPreconditionError if these tokens are of an `attempt` that is not the job's; 0 is any. A lost connection
        is made again for `reconnect_s`, and the output goes on with the next token. `timeout_s` bounds the whole.
        Raises NotFoundError, and the error that ended the job.
        """
        reader, retry = OutputReader(from_token, attempt=attempt), Reconnection(self._contact, reconnect_s, timeout_s)
        return self._follow(_Output(self._servers[0], "WatchJob", lambda: reader.watch_request(job_id), reader, retry))

    async def get_job(self, job_id: str) -> JobInfo:
        """Returns a job's progress. Raises NotFoundError if there never was one, or it ended too long ago."""
        return JobInfo.from_pb((await self._ask("GetJob", build(generation_pb2.GetJobRequest, job_id=job_id))).job)

    async def list_jobs(self, *, page_size: int = 0, page_token: str = "") -> JobPage:
        """Lists some of the jobs that wait, run, or ended not long ago, the latest first."""
        request = build(generation_pb2.ListJobsRequest, page_size=page_size, page_token=page_token)
        return JobPage.from_pb(await self._ask("ListJobs", request))

    async def cancel_job(self, job_id: str) -> None:
        """Ends a job; its streams then end with the reason "abort". No effect on one that is over.

        Raises NotFoundError if there never was one, or it ended too long ago.
        """
        await self._ask("CancelJob", build(generation_pb2.CancelJobRequest, job_id=job_id))

    async def server_info(self) -> ServerState:
        """Returns the server's configuration and load."""
        return ServerState.from_pb(await self._ask("GetServerInfo", generation_pb2.GetServerInfoRequest()))

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[tuple[int, bytes]]:
        """Returns the tokens of a text or a conversation: the id of each, and the bytes that it adds to a text."""
        found = await self._ask("Tokenize", tokenize_request(prompt, add_special_tokens, chat))
        return list(zip(found.ids, found.tokens, strict=True))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of tokens."""
        return str((await self._ask("Detokenize", detokenize_request(token_ids, skip_special_tokens))).text)

    async def is_serving(self, *, timeout_s: float) -> bool:
        """Returns whether the server answers in that time, and serves. Needs no API key."""
        return await self._serves(self._servers[0], timeout_s)

    async def _ask(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Makes a call with one answer."""
        with self._contact.our_errors():
            return await self._answer_of(getattr(self._stub, method)(request, timeout=timeout_s))

    async def _serves(self, server: _Server, timeout_s: float) -> bool:
        try:
            answer = await self._answer_of(server.health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s))
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _call(self, output: _Output) -> Any:
        server = output.server
        if output.method != "Generate" or self._together_from is None or server.num_outputs <= self._together_from:
            return output.call()
        if server.delivery is None or server.delivery.is_over:
            server.delivery = Delivery(server.stub)
        delivery = server.delivery
        if not await delivery.opened():
            return output.call()
        return delivery.generate(output.next_request(), output.retry.time_left_s, output.call)

    async def _follow(self, output: _Output) -> AsyncGenerator[OutputChunk, None]:
        while not output.reader.is_over:
            server = output.server
            server.num_outputs += 1
            call: Any = None
            try:
                call = await self._call(output)
                with server.contact.our_errors():
                    async for message in self._messages_of(call):
                        chunk = output.read(message)
                        if chunk is not None:
                            yield chunk
                output.reader.check_end()
            except SlipstreamError as error:
                pause_s = output.pause_after(error)
                for other in self._others(output, error):
                    if await self._serves(other, MOVE_TIMEOUT_S):
                        self._move(output, other)
                        break
                else:
                    await self._sleep(pause_s)
            finally:
                server.num_outputs -= 1
                if not server.num_outputs and server.delivery is not None:
                    server.delivery.close()
                if call is not None:
                    call.cancel()

    def _others(self, output: _Output, error: SlipstreamError) -> Sequence[_Server]:
        """Returns the servers at which an output may go on after an error, in the order in which to try them."""
        is_gone = isinstance(error, UnavailableError) or (
            isinstance(error, ResourceExhaustedError) and error.retry_after_ms != 0
        )
        if output.request is None or not is_gone:
            return ()
        at = self._servers.index(output.server)
        return [*self._servers[at + 1 :], *self._servers[:at]]

    def _move(self, output: _Output, server: _Server) -> None:
        logger.info("going on at %s", server.contact.address)
        server.contact.is_made = True
        output.move(server)
        self._latest = server


class _BlockingClient(AsyncClient):
    """Its coroutines block where those of its base wait."""

    _open_channel = staticmethod(open_channel)

    @staticmethod
    async def _sleep(delay: float) -> None:
        time.sleep(delay)  # noqa: ASYNC251

    @staticmethod
    async def _answer_of(call: Any) -> Any:
        return call

    @staticmethod
    async def _messages_of(call: Any) -> AsyncGenerator[Any, None]:
        for message in call:
            yield message


def _result_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a client without an event loop blocks, and does not wait")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Makes a method of `Client` of one of `AsyncClient`."""

    @wraps(method)
    def blocking(self: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return _result_of(method(self._client, *arguments, **options))

    return blocking


def _reading(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[OutputChunk, None]],
) -> Callable[Concatenate[Client, P], Generator[OutputChunk, None, None]]:
    """Makes a method of `Client` of one of `AsyncClient` that returns a generator."""

    def read(chunks: AsyncGenerator[OutputChunk, None]) -> Generator[OutputChunk, None, None]:
        try:
            while (chunk := _result_of(anext(chunks, None))) is not None:
                yield chunk
        finally:
            _result_of(chunks.aclose())

    @wraps(method)
    def reading(self: Client, /, *arguments: P.args, **options: P.kwargs) -> Generator[OutputChunk, None, None]:
        return read(method(self._client, *arguments, **options))

    return reading


class Client:
    """One connection to a server, for any number of threads. As `AsyncClient`, but every call blocks.

    >>> with Client("127.0.0.1:50051") as client:
    ...     for chunk in client.generate("Once upon a time", max_new_tokens=64):
    ...         print(chunk.text, end="")
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keepalive: Keepalive | None = None,
        **access: Unpack[AccessOptions],
    ) -> None:
        """See `AsyncClient`."""
        self._client = _BlockingClient(address, connect_timeout_s=connect_timeout_s, keepalive=keepalive, **access)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def with_key(self, api_key: str) -> Self:
        """Returns a client of the same connection whose calls send another API key. Raises ConfigError for no key."""
        other = copy(self)
        other._client = self._client.with_key(api_key)
        return other

    close = _blocking(AsyncClient.close)
    generate = _reading(AsyncClient.generate)
    watch_job = _reading(AsyncClient.watch_job)
    create_job = _blocking(AsyncClient.create_job)
    get_job = _blocking(AsyncClient.get_job)
    list_jobs = _blocking(AsyncClient.list_jobs)
    cancel_job = _blocking(AsyncClient.cancel_job)
    server_info = _blocking(AsyncClient.server_info)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    is_serving = _blocking(AsyncClient.is_serving)
