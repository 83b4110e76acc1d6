"""A call of OpenAI's interface, and what all calls share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from slipstream.client import AsyncClient
from slipstream.common.errors import SlipstreamError, UnauthenticatedError, UnavailableError
from slipstream.door.answers import JSON, event, send_whole
from slipstream.door.errors import ApiError, api_error
from slipstream.door.fields import parse
from slipstream.door.parsers import Forms

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from starlette.types import Receive, Send

    from slipstream.client.requests import Prompt, RequestOptions
    from slipstream.common.rpc.metrics import RpcMetrics
    from slipstream.common.wire.job import OutputChunk
    from slipstream.common.wire.server import ServerState
    from slipstream.door.answers import Answer, Outputs
    from slipstream.door.config import DoorConfig
    from slipstream.door.constraints import Constraint
    from slipstream.door.fields import RequestT

T = TypeVar("T")

_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

STATE_AGE_S = 1.0
"""Age up to which what the server said of itself is not asked for again."""
KEPT_CLIENTS = 1024
"""API keys whose clients are kept; each has the stubs of the gateway's calls."""
MAX_BODY_BYTES = 8 * 2**20
"""Twice what the gateway takes of a request, as JSON is longer."""
LARGE_BODY_BYTES = 2**16
"""Bytes of a body from which on a thread reads it."""
MAX_COMMAS = 2**15
"""Commas of a large body beside one for each token of the context: to read more values takes tens of milliseconds, in
which nothing else is done."""
MAX_ARRIVING_BYTES = 256 * 2**20
"""Bytes of all bodies that are being received, or whose calls are under way."""
MAX_ARRIVING_BYTES_OF_A_KEY = MAX_ARRIVING_BYTES // 4


class Door:
    """What all calls share: the client of the gateway, the server's names and forms, and the bounds of bodies."""

    def __init__(self, client: AsyncClient, config: DoorConfig, metrics: RpcMetrics) -> None:
        self.client = client
        self.config = config
        self.metrics = metrics
        self.reading = ThreadPoolExecutor(1, "reading")
        self._arriving = Counter[AsyncClient]()
        """Bytes of bodies by the client of their key."""
        self._clients: dict[str, AsyncClient] = {}
        self._state: ServerState | None = None
        self._state_at = 0.0
        self._asking = asyncio.Lock()
        """Calls that arrive together ask once."""

    async def client_for(self, authorization: str) -> AsyncClient:
        """The client that sends a caller's key. Raises UnauthenticatedError where one is missing, or is not known.

        So no body is received without a key that the gateway has known.
        """
        scheme, _, key = authorization.partition(" ")
        if not self.config.asks_for_keys:
            return self.client
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError("no API key: send `Authorization: Bearer TOKEN`")
        if key not in self._clients:
            found = self.client.with_key(key.strip())
            await self._ask(found)
            self._clients.setdefault(key, found)  # not in place of one that a call beside this has made
        self._clients[key] = found = self._clients.pop(key)
        if len(self._clients) > KEPT_CLIENTS:
            del self._clients[next(iter(self._clients))]
        return found

    @asynccontextmanager
    async def receiving(self, receive: Receive, client: AsyncClient) -> AsyncIterator[bytes]:
        """Receives a body, which counts until the context ends. Raises ApiError for one that is too large or slow."""
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self.config.read_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionResetError("the client went away")
                    part = message.get("body", b"")
                    num_bytes += len(part)
                    self._arriving[client] += len(part)
                    if num_bytes > MAX_BODY_BYTES:
                        accepted = f"at most {MAX_BODY_BYTES} bytes"
                        raise ApiError(413, f"the body is too large, accepted: {accepted}", code="request_too_large")
                    most = MAX_ARRIVING_BYTES if client is self.client else MAX_ARRIVING_BYTES_OF_A_KEY
                    if self._arriving[client] > most or self._arriving.total() > MAX_ARRIVING_BYTES:
                        raise ApiError(
                            503, "too many bodies arrive", kind="server_error", headers=[(b"retry-after", b"1")]
                        )
                    parts.append(part)
                    if not message.get("more_body"):
                        break
            yield b"".join(parts)
        finally:
            self._arriving[client] -= num_bytes
            if not self._arriving[client]:
                del self._arriving[client]

    async def state(self, client: AsyncClient, *, is_fresh: bool = False) -> ServerState:
        """What the server says of itself, or said before it went away. Raises SlipstreamError.

        `is_fresh`: it is asked for in any case, which checks the client's key.
        """
        if is_fresh:
            return await self._ask(client)
        async with self._asking:
            if self._state is None or time.monotonic() >= self._state_at + STATE_AGE_S:
                try:
                    return await self._ask(client)
                except UnavailableError:
                    if self._state is None:
                        raise
                    self._state_at = time.monotonic()
            return self._state

    async def _ask(self, client: AsyncClient) -> ServerState:
        self._state = state = await client.server_info()
        self._state_at = time.monotonic()
        return state


@dataclass(frozen=True, slots=True)
class Call:
    """A call: its request, its sender, and how to answer."""

    door: Door
    client: AsyncClient
    body: bytes
    out: Send
    path_params: dict[str, str]
    names: dict[str, str]
    """Gets our names of fields that have other names here, and those."""

    async def aside(self, work: Callable[[], T]) -> T:
        """Does work that takes as long as the body is large, beside the event loop if that is long."""
        if len(self.body) < LARGE_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.door.reading, work)

    async def read(self, kind: type[RequestT]) -> tuple[RequestT, ServerState]:
        """Reads the request, and says what serves it. Raises ApiError for a wrong field, and for another model."""
        if len(self.body) >= LARGE_BODY_BYTES:
            most = MAX_COMMAS + (await self.door.state(self.client)).context_tokens
            if (count := self.body.count(b",")) > most:
                accepted = f"at most {most} commas, in JSON and in text: one for each token of the context, and some"
                raise ApiError(413, f"the body: got {count}, accepted: {accepted}", code="request_too_large")
        self.names.update(kind.names)
        request = await self.aside(partial(parse, self.body, kind))
        return request, await self.served(request.model)

    def constrain(self, options: RequestOptions, constraint: Constraint | None) -> None:
        """Has the output keep to a constraint. Errors about it name the field of this call that says it."""
        if constraint is not None:
            options[constraint.field] = constraint.value  # type: ignore[literal-required]
            self.names[constraint.field] = self.names.get(constraint.param, constraint.param)

    def generate(self, prompt: Prompt, options: RequestOptions) -> AsyncGenerator[OutputChunk, None]:
        """Makes a job, with the first chunk that is asked for, which lives as long as the call."""
        return self.client.generate(prompt, reconnect_s=self.door.config.reconnect_s, **options)

    async def served(self, model: str | None) -> ServerState:
        """The server, if it has this model. Raises ApiError for another one."""
        state = await self.door.state(self.client)
        if model is not None and model not in state.served_names:
            state = await self.door.state(self.client, is_fresh=True)
            if model not in state.served_names:
                names = ", ".join(state.served_names)
                message = f"model: got {model!r}, accepted: {names}"
                raise ApiError(404, message, param="model", code="model_not_found")
        return state

    def forms(self, state: ServerState) -> Forms:
        """The forms of calls and thoughts, as the configuration or the chat template says."""
        tools, reasoning = self.door.config.tool_call_parser, self.door.config.reasoning_parser
        return Forms(
            state.tool_call_format if tools == "auto" else tools.replace("none", ""),
            state.reasoning_format if reasoning == "auto" else reasoning.replace("none", ""),
        )

    async def send(self, answer: Answer, outputs: Outputs) -> None:
        """Answers with what becomes of outputs."""
        if answer.is_stream:
            await self.send_stream(answer.events(outputs))
        else:
            await self.send_whole(await answer.whole(outputs))

    async def send_whole(self, body: bytes, *, kind: str = JSON, status: int = 200) -> None:
        """Answers with a body of this type."""
        await send_whole(self.out, body, kind=kind, status=status)

    async def send_stream(self, events: AsyncGenerator[bytes, None]) -> None:
        """Answers with events as they arrive. Raises what the first one raises; a later error is an event."""

        async def send_part(part: bytes, *, has_more: bool = True) -> None:
            await self.out({"type": "http.response.body", "body": part, "more_body": has_more})

        # The end of the events ends their job.
        async with aclosing(events):
            first = await anext(events, b"")
            await self.out({"type": "http.response.start", "status": 200, "headers": _STREAM})
            await send_part(first)
            try:
                async for part in events:
                    await send_part(part)
            except SlipstreamError as error:
                await send_part(event(api_error(error, self.names).content))
            await send_part(b"", has_more=False)
