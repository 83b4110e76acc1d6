"""Server-sent events and answers, as bytes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.common.errors import SlipstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from starlette.types import Send

    from slipstream.door.errors import ApiError

DONE = b"data: [DONE]\n\n"
_JSON = [(b"content-type", b"application/json")]
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
encode = msgspec.json.Encoder().encode


def event(content: Any, *, name: str = "") -> bytes:
    """Encodes an event of this content, under a name if there is one."""
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % encode(content)


async def send_json(send: Send, body: bytes, *, status: int = 200, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Sends an answer of JSON; `more` are headers."""
    headers = [*_JSON, (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Sends an error as an answer of its own."""
    retry = [] if error.retry_after_s is None else [(b"retry-after", b"%d" % error.retry_after_s)]
    challenge = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
    await send_json(send, error.body, status=error.status, more=[*retry, *challenge])


async def send_stream(
    send: Send,
    events: AsyncGenerator[bytes, None],
    to_error: Callable[[SlipstreamError], ApiError],
    *,
    read_timeout_s: float,
) -> None:
    """Sends events as they come. Raises what the first one raises; a later error is an event, as `to_error` has it.

    Raises TimeoutError for a client that reads nothing for so long.
    """
    loop = asyncio.get_running_loop()
    # The end of the events ends their job.
    async with aclosing(events), asyncio.timeout(None) as bound:
        first = await anext(events, b"")
        bound.reschedule(loop.time() + read_timeout_s)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        bound.reschedule(None)
        try:
            async for one in events:
                bound.reschedule(loop.time() + read_timeout_s)
                await send({"type": "http.response.body", "body": one, "more_body": True})
                bound.reschedule(None)
        except SlipstreamError as error:
            bound.reschedule(loop.time() + read_timeout_s)
            body = event(to_error(error).content)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        bound.reschedule(loop.time() + read_timeout_s)
        await send({"type": "http.response.body", "body": b""})
