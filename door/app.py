"""The application: its routes, and what their calls have in common."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.routing import Route, Router

from slipstream.common.errors import InvalidArgumentError, SlipstreamError
from slipstream.door.answers import TEXT, encode, send_error, token_text
from slipstream.door.call import Call, Door
from slipstream.door.chat import chat_completions
from slipstream.door.completions import completions
from slipstream.door.errors import ApiError, api_error
from slipstream.door.fields import DetokenizeRequest, TokenizeRequest, conversation_of
from slipstream.door.responses import responses

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prometheus_client import CollectorRegistry
    from starlette.types import Receive, Scope, Send


logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
_OPEN = ("/health", "/version")
"""Paths that need no key."""


class Endpoint:
    """Serves one path: receives the body, calls, and answers errors. The end of the connection ends the call."""

    def __init__(self, door: Door, method: str, path: str, handle: Callable[[Call], Awaitable[None]]) -> None:
        self._door = door
        self._methods = ("GET", "HEAD") if method == "GET" else (method,)
        self._name = f"{method} {path}"
        """In metrics."""
        self._handle = handle
        self._is_open = path in _OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # of a client that went away, as nginx has it
        names: dict[str, str] = {}

        async def send_counted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, send_counted, names)
        except (TimeoutError, ConnectionError) as error:
            logger.debug("a client was too slow, or went away: %r", error)
        except ApiError as error:
            await send_error(send_counted, error)
        except SlipstreamError as error:
            await send_error(send_counted, api_error(error, names))
        except RecursionError:
            # What has just the depth that can be read may be too deep to be written.
            await send_error(send_counted, ApiError(400, "the body is nested too deeply", code="invalid_json"))
        except Exception:
            logger.exception("%s failed", scope["path"])
            if status == 499:
                await send_error(send_counted, ApiError(500, "the server's log has more", kind="server_error"))
        finally:
            self._door.metrics.count(self._name, str(status))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, names: dict[str, str]) -> None:
        if scope["method"] not in self._methods:
            accepted = ", ".join(self._methods)
            message = f"{scope['path']}: got {scope['method']}, accepted: {accepted}"
            raise ApiError(405, message, code="method_not_allowed", headers=[(b"allow", accepted.encode())])
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = given[0].decode("latin-1") if len(given) == 1 else ""
        client = self._door.client if self._is_open else await self._door.client_for(key)
        try:
            async with self._door.receiving(receive, client) as body:
                call = Call(self._door, client, body, send, scope["path_params"], names)
                await _while_connected(self._handle(call), receive)
        except (ApiError, InvalidArgumentError):
            if not self._is_open and self._door.config.asks_for_keys:
                # Perhaps the door itself refused the call: what is wrong with it is only for who has a key.
                await self._door.state(client, is_fresh=True)
            raise


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Does the work; drops it, and raises ConnectionError, when the client goes away."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ConnectionResetError("the client went away")
        await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _models(call: Call) -> None:
    """Lists the models, or says what the path's is."""
    state = await call.door.state(call.client, is_fresh=True)
    fields = {"object": "model", "created": 0, "owned_by": "slipstream", "max_model_len": state.context_tokens}
    content: dict[str, Any] = {"object": "list", "data": [{"id": name, **fields} for name in state.served_names]}
    if (name := call.path_params.get("model")) is not None:
        await call.served(name)
        content = {"id": name, **fields}
    await call.send_whole(encode(content))


async def _tokenize(call: Call) -> None:
    request, state = await call.read(TokenizeRequest)
    if request.messages is None:
        found = await call.client.tokenize(request.prompt or "", add_special_tokens=request.add_special_tokens)
    else:
        found = await call.client.tokenize(
            conversation_of(request.messages),
            tools=request.tools,
            template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
    texts = {"token_strs": [token_text(token) for _, token in found]} if request.return_token_strs else {}
    tokens = [token for token, _ in found]
    content = {"count": len(found), "max_model_len": state.context_tokens, "tokens": tokens, **texts}
    await call.send_whole(encode(content))


async def _detokenize(call: Call) -> None:
    request, _ = await call.read(DetokenizeRequest)
    text = await call.client.detokenize(request.tokens, skip_special_tokens=bool(request.skip_special_tokens))
    await call.send_whole(encode({"prompt": text}))


async def _health(call: Call) -> None:
    is_serving = await call.client.is_serving(timeout_s=HEALTH_TIMEOUT_S)
    await call.send_whole(b"", kind=TEXT, status=200 if is_serving else 503)


async def _version(call: Call) -> None:
    await call.send_whole(encode({"version": version("slipstream-serve")}))


async def _metrics(registry: CollectorRegistry, call: Call) -> None:
    if call.door.config.asks_for_keys:
        await call.door.state(call.client, is_fresh=True)
    page = await asyncio.to_thread(generate_latest, registry)
    await call.send_whole(page, kind=CONTENT_TYPE_LATEST)


def make_app(door: Door, registry: CollectorRegistry) -> Router:
    """Makes the application."""
    calls: list[tuple[str, str, Callable[[Call], Awaitable[None]]]] = [
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat_completions),
        ("POST", "/v1/responses", responses),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{model:path}", _models),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/health", _health),
        ("GET", "/version", _version),
        ("GET", "/metrics", partial(_metrics, registry)),
    ]
    routes = [Route(path, Endpoint(door, method, path, handle)) for method, path, handle in calls]
    return Router(routes, redirect_slashes=False, default=_no_such_path)


async def _no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    await send_error(send, ApiError(404, f"there is no {scope['method']} {scope['path']} here", code="not_found"))
