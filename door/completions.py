"""/v1/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from slipstream.door.answers import CompletionLogprobs, Envelope, Usages, merged
from slipstream.door.fields import CompletionRequest, parse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from slipstream.common.wire.job import OutputChunk
    from slipstream.door.call import Call

NAMES = {"top_logprobs": "logprobs"}
"""Fields that this call has other names for."""


async def completions(call: Call) -> None:
    """Answers a request, with a stream or without."""
    request = parse(call.body, CompletionRequest)
    request.check()
    state = await call.served(request.model)
    prompts, options = request.prompts, request.options()
    envelope = Envelope(
        "cmpl", "text_completion", request.model or state.served_names[0], includes_usage=request.includes_usage
    )
    echoes = [await _text_of(prompt, call) if request.echo else "" for prompt in prompts]
    outputs = [call.client.generate(prompt, reconnect_s=call.reconnect_s, **options) for prompt in prompts]
    completion = _Completion(envelope, echoes, request.n or 1, has_logprobs=request.logprobs is not None)
    if request.stream:
        await call.send_stream(completion.events(outputs))
    else:
        await call.send_json(await completion.whole(outputs))


async def _text_of(prompt: str | list[int], call: Call) -> str:
    return prompt if isinstance(prompt, str) else await call.client.detokenize(prompt)


class _Completion:
    def __init__(self, envelope: Envelope, echoes: list[str], n: int, *, has_logprobs: bool) -> None:
        self._envelope = envelope
        self._echoes = echoes
        self._n = n
        self._usages = Usages()
        num_choices = n * len(echoes)
        self._logprobs = [CompletionLogprobs() for _ in range(num_choices)] if has_logprobs else []
        self._has_begun = [not any(echoes)] * num_choices

    async def events(self, outputs: list[AsyncGenerator[OutputChunk, None]]) -> AsyncGenerator[bytes, None]:
        async with aclosing(merged(outputs)) as chunks:
            async for index, chunk in chunks:
                choice = self._choice(index, chunk)
                if chunk.job_usage is not None:
                    self._usages.add(chunk.job_usage)
                if choice["text"] or choice["finish_reason"] or choice["logprobs"]:
                    yield self._envelope.event(choice)
        yield self._envelope.end(self._usages)

    async def whole(self, outputs: list[AsyncGenerator[OutputChunk, None]]) -> bytes:
        choices: dict[int, dict[str, Any]] = {}
        async with aclosing(merged(outputs)) as chunks:
            async for index, chunk in chunks:
                if chunk.job_usage is not None:
                    self._usages.add(chunk.job_usage)
                part = self._choice(index, chunk)
                choice = choices.setdefault(part["index"], part)
                if choice is part:
                    choice["text"] = [part["text"]]
                    continue
                choice["text"].append(part["text"])
                choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
                for name, values in (part["logprobs"] or {}).items():
                    choice["logprobs"][name] += values
        for choice in choices.values():
            choice["text"] = "".join(choice["text"])
        return self._envelope.answer([choices[index] for index in sorted(choices)], self._usages)

    def _choice(self, prompt_index: int, chunk: OutputChunk) -> dict[str, Any]:
        index, text = prompt_index * self._n + chunk.sample_index, chunk.text
        if not self._has_begun[index]:
            self._has_begun[index], text = True, self._echoes[prompt_index] + text
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].part(chunk) if self._logprobs else None,
            "finish_reason": chunk.finish_reason,
        }
