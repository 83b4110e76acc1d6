"""/v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.common.wire.job import FinishReason
from slipstream.door.answers import Answer, logprob_items
from slipstream.door.constraints import constraint_of_chat
from slipstream.door.errors import refused
from slipstream.door.fields import ChatRequest, conversation_of
from slipstream.door.parsers import Reasoning, make_parser
from slipstream.door.tools import Arguments, Content
from slipstream.door.tools import Call as ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.client.requests import RequestOptions
    from slipstream.common.wire.job import OutputChunk
    from slipstream.common.wire.server import ServerState
    from slipstream.door.call import Call
    from slipstream.door.parsers import Delta, Forms


async def chat_completions(call: Call) -> None:
    """Answers a request, with a stream or without."""
    request, state = await call.read(ChatRequest)
    options, forms = request.options(state.sampling_defaults), call.forms(state)
    prepare(call, request, options, forms)
    output = await call.aside(lambda: call.generate(conversation_of(request.messages), options))
    samples = [Sample(request, options, forms) for _ in range(request.n or 1)]
    await call.send(_Conversations(request, state, samples), [output])


def prepare(call: Call, request: ChatRequest, options: RequestOptions, forms: Forms) -> None:
    """Asks for the text that parsers need, and for what it keeps to. Raises ApiError for what cannot be honoured."""
    if options.get("tools") and not forms.tools:
        accepted = "none: no form of calls is found in the chat template, and --tool-call-parser names none"
        raise refused("tools", f"{len(options['tools'] or ())} tools", accepted)
    if forms.needs_special_tokens(has_tools=bool(options.get("tools"))):
        options["skip_special_tokens"] = False
    call.constrain(options, constraint_of_chat(request, options.get("template_kwargs") or {}, forms))


class Sample:
    """The output of a sample: what is said, thought and called."""

    def __init__(self, request: ChatRequest, options: RequestOptions, forms: Forms) -> None:
        self.num_calls = 0
        self._has_one_call = request.parallel_tool_calls is False
        self._parser = make_parser(forms, options.get("tools") or (), options.get("template_kwargs") or {})
        self._has_thoughts = bool(forms.reasoning)
        self.num_reasoning_tokens = 0
        """Tokens of thoughts, with that which ends the mark before them, up to that which ends the mark after them."""

    def read(self, chunk: OutputChunk) -> Sequence[Delta]:
        """The next parts of the output."""
        parser = self._parser
        if parser is None:
            return (Content(chunk.text),) if chunk.text else ()
        found: list[Delta] = []
        begin = 0
        if self._has_thoughts:
            for length in chunk.text_lengths:
                was_thinking = parser.is_thinking
                found += parser.push(chunk.text[begin : begin + length])
                begin += length
                self.num_reasoning_tokens += was_thinking or parser.is_thinking
        found += parser.push(chunk.text[begin:])
        if chunk.finish_reason is not None:
            found += parser.finish()
        return [delta for delta in found if self._counts(delta)]

    def finish_reason(self, chunk: OutputChunk) -> str | None:
        """The reason of the end, if the chunk is the last."""
        if chunk.finish_reason is FinishReason.STOP and self.num_calls:
            return "tool_calls"
        return None if chunk.finish_reason is None else str(chunk.finish_reason)

    def _counts(self, delta: Delta) -> bool:
        self.num_calls += isinstance(delta, ToolCall)
        return not (self._has_one_call and self.num_calls > 1 and isinstance(delta, ToolCall | Arguments))


class _Conversations(Answer):
    def __init__(self, request: ChatRequest, state: ServerState, samples: list[Sample]) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__("chatcmpl", kind, request, state)
        self._samples = samples
        self._begun: set[int] = set()
        self._has_logprobs = bool(request.logprobs)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(sample.num_reasoning_tokens for sample in self._samples)

    def parts(self, index: int, chunk: OutputChunk) -> Sequence[dict[str, Any]]:
        sample, parts = self._samples[index], []

        def add(delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> None:
            parts.append({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

        if index not in self._begun:
            self._begun.add(index)
            add({"role": "assistant", "content": ""})
        num_calls = sample.num_calls
        deltas = sample.read(chunk)
        logprobs = self._logprobs(chunk) if chunk.logprobs else None
        for delta in deltas or ([Content("")] if logprobs else []):
            num_calls += isinstance(delta, ToolCall)
            add(_field(delta, num_calls - 1), logprobs)
            logprobs = None
        if chunk.finish_reason is not None:
            add({}, reason=sample.finish_reason(chunk))
        return parts

    def choice(self, index: int, output: OutputChunk) -> dict[str, Any]:
        sample = self._samples[index]
        return {
            "index": index,
            "message": message_of(sample.read(output)),
            "logprobs": self._logprobs(output),
            "finish_reason": sample.finish_reason(output),
        }

    def _logprobs(self, chunk: OutputChunk) -> dict[str, Any] | None:
        return {"content": logprob_items(chunk.logprobs)} if self._has_logprobs else None


def message_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message that the parts of an output make."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, ToolCall):
            calls.append(_call(delta))
        elif isinstance(delta, Arguments):
            calls[-1]["function"]["arguments"] += delta.text
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}


def _field(delta: Delta, call_index: int) -> dict[str, Any]:
    """The field of a delta; `call_index`: of the newest call."""
    match delta:
        case Content():
            return {"content": delta.text}
        case Reasoning():
            return {"reasoning_content": delta.text}
        case ToolCall():
            return {"tool_calls": [{"index": call_index, **_call(delta)}]}
        case Arguments():
            return {"tool_calls": [{"index": call_index, "function": {"arguments": delta.text}}]}
