"""Answers with choices, whole or as a stream: sending, usage, logprobs, several prompts at once."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from starlette.types import Send

    from slipstream.common.wire.job import OutputChunk, TokenLogprobs, Usage
    from slipstream.common.wire.server import ServerState
    from slipstream.door.errors import ApiError
    from slipstream.door.fields import Sampling

Outputs: TypeAlias = "Sequence[AsyncGenerator[OutputChunk, None]]"
"""The outputs of a request's jobs, in the order of its prompts."""

DONE = b"data: [DONE]\n\n"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
encode = msgspec.json.Encoder().encode


def event(content: Any, *, name: str = "") -> bytes:
    """Encodes an event of this content, under a name if there is one."""
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % encode(content)


async def send_whole(
    send: Send, body: bytes, *, kind: str = JSON, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Sends an answer of this type."""
    own = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Sends an error as an answer of its own."""
    await send_whole(send, encode(error.content), status=error.status, headers=error.headers)


class Answer(ABC):
    """An answer with choices, whole or as a stream, and what is the same in all of its events."""

    def __init__(self, prefix: str, kind: str, request: Sampling, state: ServerState) -> None:
        """`prefix` is that of the answer's id; `kind` its object. A job has the next `n` of the choices."""
        self.is_stream = bool(request.stream)
        self._num_samples = request.n or 1
        self._has_usage = request.includes_usage
        self._usages: list[Usage] = []
        self._fields: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": request.model or state.served_names[0],
        }

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts so far."""
        return 0

    @abstractmethod
    def parts(self, index: int, chunk: OutputChunk) -> Sequence[dict[str, Any]]:
        """Makes the choices of a stream's event from the next part of a choice's output."""

    @abstractmethod
    def choice(self, index: int, output: OutputChunk) -> dict[str, Any]:
        """The choice of a whole output."""

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        head = b"data: " + encode(self._fields)[:-1] + b',"choices":['
        tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"
        async with aclosing(self._chunks(outputs)) as chunks:
            async for index, chunk in chunks:
                if parts := self.parts(index, chunk):
                    yield b"".join([head + encode(part) + tail for part in parts])
        yield head + b'],"usage":' + encode(self._usage()) + b"}\n\n" + DONE if self._has_usage else DONE

    async def whole(self, outputs: Outputs) -> bytes:
        """The whole answer."""
        found: dict[int, list[OutputChunk]] = {}
        async with aclosing(self._chunks(outputs)) as chunks:
            async for index, chunk in chunks:
                found.setdefault(index, []).append(chunk)
        choices = [self.choice(index, joined(found[index])) for index in sorted(found)]
        return encode({**self._fields, "choices": choices, "usage": self._usage()})

    async def _chunks(self, outputs: Outputs) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        async with aclosing(merged(outputs)) as chunks:
            async for job, chunk in chunks:
                if chunk.job_usage is not None:
                    self._usages.append(chunk.job_usage)
                yield job * self._num_samples + chunk.sample_index, chunk

    def _usage(self) -> dict[str, Any]:
        """The usage of all jobs. Drafts are the predictions that OpenAI counts."""
        jobs = self._usages
        prompt, completion = sum(job.prompt_tokens for job in jobs), sum(job.completion_tokens for job in jobs)
        accepted = sum(job.total_accepted_tokens for job in jobs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens for job in jobs)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(job.total_draft_tokens for job in jobs) - accepted,
                "reasoning_tokens": self.num_reasoning_tokens,
            },
        }


def joined(chunks: Sequence[OutputChunk]) -> OutputChunk:
    """All chunks of a sample as one."""
    return replace(
        chunks[-1],
        token_offset=0,
        text="".join(chunk.text for chunk in chunks),
        text_lengths=tuple(length for chunk in chunks for length in chunk.text_lengths),
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
    )


def token_by_token(chunk: OutputChunk) -> Iterator[OutputChunk]:
    """Each token of a chunk with logprobs as one of its own."""
    begin, last = 0, len(chunk.logprobs) - 1
    for index, (length, logprobs) in enumerate(zip(chunk.text_lengths, chunk.logprobs, strict=True)):
        text = chunk.text[begin : begin + length] if index < last else chunk.text[begin:]
        reason = chunk.finish_reason if index == last else None
        yield replace(chunk, text=text, text_lengths=(length,), logprobs=(logprobs,), finish_reason=reason)
        begin += length


async def merged(outputs: Outputs) -> AsyncGenerator[tuple[int, OutputChunk], None]:
    """Yields the chunks of several jobs as they arrive, with the index of the job. Ends all with the first error."""
    if len(outputs) == 1:
        async with aclosing(outputs[0]) as output:
            async for chunk in output:
                yield 0, chunk
        return
    pending = {asyncio.ensure_future(anext(output, None)): index for index, output in enumerate(outputs)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                if (found := task.result()) is not None:
                    yield index, found
                    pending[asyncio.ensure_future(anext(outputs[index], None))] = index
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for output in outputs:
            await output.aclose()


def token_text(token: bytes) -> str:
    """The text of a token; of a part of a character its bytes, as OpenAI writes them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def logprob_items(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """The logprobs of a message's tokens."""
    return [
        {
            **_logprob(one.token, one.logprob),
            "top_logprobs": [_logprob(token, value) for token, (_, value) in zip(one.top_tokens, one.top, strict=True)],
        }
        for one in logprobs
    ]


def _logprob(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token)}
