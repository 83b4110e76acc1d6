"""/v1/chat/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from slipstream.common.wire.job import FinishReason
from slipstream.door.answers import Envelope, Usages, chat_logprobs, merged
from slipstream.door.errors import refused
from slipstream.door.fields import ChatRequest, conversation_of, parse
from slipstream.door.parsers import Call as ToolCall
from slipstream.door.parsers import Content, Parser, Reasoning, make_parser

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from slipstream.client.requests import RequestOptions
    from slipstream.common.wire.job import OutputChunk
    from slipstream.door.call import Call
    from slipstream.door.parsers import Delta, Forms

NAMES = {"max_tokens": "max_completion_tokens"}
"""Fields that this call has other names for."""


async def chat_completions(call: Call) -> None:
    """Answers a request, with a stream or without."""
    request = parse(call.body, ChatRequest)
    request.check()
    state = await call.served(request.model)
    options = request.options()
    forms = call.forms(state)
    prepare_parsing(options, forms)
    messages = conversation_of(request.messages)
    output = call.client.generate(messages, reconnect_s=call.reconnect_s, **options)
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    envelope = Envelope("chatcmpl", kind, request.model or state.served_names[0], includes_usage=request.includes_usage)
    has_one_call = request.parallel_tool_calls is False
    samples = [Sample(options, forms, has_one_call=has_one_call) for _ in range(request.n or 1)]
    chat = _Chat(envelope, samples, has_logprobs=bool(request.logprobs))
    if request.stream:
        await call.send_stream(chat.events(output))
    else:
        await call.send_json(await chat.whole(output))


def prepare_parsing(options: RequestOptions, forms: Forms) -> None:
    """Asks for the text that parsers need. Raises ApiError for tools whose calls cannot be found in it."""
    if options.get("tools") and not forms.tools:
        accepted = "none: no form of calls is found in the chat template, and --tool-call-parser names none"
        raise refused("tools", f"{len(options['tools'] or ())} tools", accepted)
    if forms.needs_special_tokens(has_tools=bool(options.get("tools"))):
        options["skip_special_tokens"] = False


class Sample:
    """The output of a sample: what is said, thought and called."""

    def __init__(self, options: RequestOptions, forms: Forms, *, has_one_call: bool) -> None:
        self.num_calls = 0
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        """Tokens up to the newest message with thoughts."""
        self._has_one_call = has_one_call
        self._parser: Parser | None = make_parser(
            forms, options.get("tools") or (), options.get("template_kwargs") or {}
        )

    def read(self, chunk: OutputChunk) -> Sequence[Delta]:
        """The next parts of the output."""
        self.num_tokens += len(chunk.token_ids)
        if self._parser is None:
            return (Content(chunk.text),) if chunk.text else ()
        found = self._parser.push(chunk.text) if chunk.text else []
        if chunk.finish_reason is not None:
            found = [*found, *self._parser.finish()]
        if any(isinstance(delta, Reasoning) for delta in found):
            self.num_reasoning_tokens = self.num_tokens
        return [delta for delta in found if self._counts(delta)]

    def finish_reason(self, chunk: OutputChunk) -> str | None:
        """The reason of the end, if the chunk is the last."""
        if chunk.finish_reason is FinishReason.STOP and self.num_calls:
            return "tool_calls"
        return None if chunk.finish_reason is None else str(chunk.finish_reason)

    def _counts(self, delta: Delta) -> bool:
        if not isinstance(delta, ToolCall):
            return True
        self.num_calls += 1
        return self.num_calls == 1 or not self._has_one_call


class _Chat:
    def __init__(self, envelope: Envelope, samples: list[Sample], *, has_logprobs: bool) -> None:
        self._envelope = envelope
        self._samples = samples
        self._has_logprobs = has_logprobs
        self._usages = Usages()

    async def events(self, output: AsyncGenerator[OutputChunk, None]) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async with aclosing(merged([output])) as chunks:
            async for _, chunk in chunks:
                index = chunk.sample_index
                sample = self._samples[index]
                events = []
                if index not in begun:
                    begun.add(index)
                    events.append(self._event(index, {"role": "assistant", "content": ""}))
                num_calls = sample.num_calls
                fields = [field for delta in sample.read(chunk) for field in _fields(delta)]
                logprobs = chat_logprobs(chunk.logprobs) if self._has_logprobs and chunk.logprobs else None
                if logprobs and not fields:
                    fields = [{"content": ""}]
                for field in fields:
                    if "tool_calls" in field:
                        num_calls += "id" in field["tool_calls"][0]
                        field["tool_calls"][0]["index"] = num_calls - 1
                    events.append(self._event(index, field, logprobs))
                    logprobs = None
                if chunk.finish_reason is not None:
                    events.append(self._event(index, {}, reason=sample.finish_reason(chunk)))
                if chunk.job_usage is not None:
                    self._usages.add(chunk.job_usage)
                if events:
                    yield b"".join(events)
        yield self._envelope.end(self._usages)

    def _event(self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
        return self._envelope.event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    async def whole(self, output: AsyncGenerator[OutputChunk, None]) -> bytes:
        said: list[list[Delta]] = [[] for _ in self._samples]
        logprobs: list[list[Any]] = [[] for _ in self._samples]
        reasons: list[str | None] = [None] * len(self._samples)
        async with aclosing(output) as chunks:
            async for chunk in chunks:
                sample = self._samples[chunk.sample_index]
                said[chunk.sample_index] += sample.read(chunk)
                logprobs[chunk.sample_index] += chunk.logprobs
                reasons[chunk.sample_index] = sample.finish_reason(chunk) or reasons[chunk.sample_index]
                if chunk.job_usage is not None:
                    self._usages.add(chunk.job_usage)
        choices = [
            {
                "index": index,
                "message": message_of(deltas),
                "logprobs": chat_logprobs(logprobs[index]) if self._has_logprobs else None,
                "finish_reason": reasons[index],
            }
            for index, deltas in enumerate(said)
        ]
        return self._envelope.answer(choices, self._usages)


def message_of(deltas: list[Delta]) -> dict[str, Any]:
    """The message that the parts of an output make."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls = [_call(delta) for delta in deltas if isinstance(delta, ToolCall)]
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _fields(delta: Delta) -> list[dict[str, Any]]:
    """The fields of a delta; those of a call begin with its name."""
    match delta:
        case Content():
            return [{"content": delta.text}]
        case Reasoning():
            return [{"reasoning_content": delta.text}]
    begun = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
    return [{"tool_calls": [begun]}, {"tool_calls": [{"function": {"arguments": delta.arguments}}]}]
