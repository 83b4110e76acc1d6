"""What answers of completions and conversations have in common: choices, logprobs, usage, several prompts at once."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from slipstream.door.events import DONE, encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from slipstream.common.wire.job import OutputChunk, TokenLogprobs, Usage


class Usages:
    """Sums up the usage of the jobs of a request."""

    def __init__(self) -> None:
        self._prompt = self._completion = self._cached = self._accepted = self._rejected = 0

    def add(self, usage: Usage) -> None:
        """Adds that of a job."""
        self._prompt += usage.prompt_tokens
        self._completion += usage.completion_tokens
        self._cached += usage.cached_tokens
        self._accepted += usage.total_accepted_tokens
        self._rejected += usage.total_draft_tokens - usage.total_accepted_tokens

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompts, of the outputs, and of prompts that were cached."""
        return self._prompt, self._completion, self._cached

    def content(self) -> dict[str, Any]:
        """The object of an answer. Drafts are the predictions that OpenAI counts."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": self._rejected,
            },
        }


class Envelope:
    """The part that is the same in all events of a stream, and in an answer."""

    def __init__(self, prefix: str, kind: str, model: str, *, includes_usage: bool = False) -> None:
        """`prefix` is that of the answer's id; `kind` its object."""
        self.fields: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._head = b"data: " + encode(self.fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if includes_usage else b"]}\n\n"
        self._includes_usage = includes_usage

    def event(self, choice: dict[str, Any]) -> bytes:
        """An event of a stream with a choice."""
        return self._head + encode(choice) + self._tail

    def end(self, usages: Usages) -> bytes:
        """The end of a stream."""
        if not self._includes_usage:
            return DONE
        return self._head + b'],"usage":' + encode(usages.content()) + b"}\n\n" + DONE

    def answer(self, choices: list[dict[str, Any]], usages: Usages) -> bytes:
        """A whole answer."""
        return encode({**self.fields, "choices": choices, "usage": usages.content()})


async def merged(
    outputs: Sequence[AsyncGenerator[OutputChunk, None]],
) -> AsyncGenerator[tuple[int, OutputChunk], None]:
    """Yields the chunks of several jobs as they come, each with the index of its job. Ends all with the first error."""
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


def chat_logprobs(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs of a message."""
    return {
        "content": [
            {
                **_chat_logprob(one.token, one.logprob),
                "top_logprobs": [
                    _chat_logprob(token, value) for token, (_, value) in zip(one.top_tokens, one.top, strict=True)
                ],
            }
            for one in logprobs
        ]
    }


def _chat_logprob(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token)}


class CompletionLogprobs:
    """The logprobs of a completion, a part at a time."""

    def __init__(self) -> None:
        self._num_characters = 0

    def part(self, chunk: OutputChunk) -> dict[str, Any]:
        """Those of the next tokens."""
        offsets = []
        for length in chunk.text_lengths:
            offsets.append(self._num_characters)
            self._num_characters += length
        return {
            "text_offset": offsets,
            "token_logprobs": [one.logprob for one in chunk.logprobs],
            "tokens": [token_text(one.token) for one in chunk.logprobs],
            "top_logprobs": [
                {token_text(token): value for token, (_, value) in zip(one.top_tokens, one.top, strict=True)}
                for one in chunk.logprobs
            ],
        }
