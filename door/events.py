"""Server-sent events and answers, as bytes."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.common.errors import SlipstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from starlette.types import Send

    from slipstream.door.errors import ApiError

DONE = b"data: [DONE]\n\n"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
encode = msgspec.json.Encoder().encode


def event(content: Any, *, name: str = "") -> bytes:
    """Encodes an event of this content, under a name if there is one."""
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % encode(content)


async def send_whole(
    send: Send, body: bytes, *, kind: str = JSON, status: int = 200, more: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Sends an answer of this type; `more` are headers."""
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Sends an error as an answer of its own."""
    retry = [] if error.retry_after_s is None else [(b"retry-after", b"%d" % error.retry_after_s)]
    challenge = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
    await send_whole(send, error.body, status=error.status, more=[*retry, *challenge])


async def send_stream(
    send: Send, events: AsyncGenerator[bytes, None], to_error: Callable[[SlipstreamError], ApiError]
) -> None:
    """Sends events as they arrive. Raises what the first one raises; a later error is an event, by `to_error`."""

    async def send_part(part: bytes, *, has_more: bool = True) -> None:
        await send({"type": "http.response.body", "body": part, "more_body": has_more})

    # The end of the events ends their job.
    async with aclosing(events):
        first = await anext(events, b"")
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        await send_part(first)
        try:
            async for part in events:
                await send_part(part)
        except SlipstreamError as error:
            await send_part(event(to_error(error).content))
        await send_part(b"", has_more=False)
