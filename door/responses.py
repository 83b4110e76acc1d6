"""/v1/responses, without a store: text, thoughts and calls of functions."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from slipstream.common.errors import SlipstreamError
from slipstream.common.wire.job import FinishReason
from slipstream.door.answers import encode, event, logprob_items, token_by_token
from slipstream.door.chat import Sample, prepare
from slipstream.door.errors import ApiError, api_error, refused
from slipstream.door.fields import (
    ChatRequest,
    Generation,
    Message,
    Part,
    ToolCall,
    ToolCallFunction,
    conversation_of,
)
from slipstream.door.parsers import Reasoning
from slipstream.door.tools import Arguments, Call, Content

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterator, Mapping

    from slipstream.common.wire.job import OutputChunk, Usage
    from slipstream.door.call import Call as ApiCall
    from slipstream.door.parsers import Delta

LOGPROBS = "message.output_text.logprobs"
"""The part of an answer that a request may ask for."""
_SAME = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs", "store")
"""Fields of a conversation, too."""
_REPEATED = ("instructions", "max_output_tokens", "previous_response_id", "user")
"""Fields that a response has as the request has them."""
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Item(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the input: a message, a call or its result, thoughts of an earlier answer."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Any] | None = None
    phase: str | None = None


class _Conversation(ChatRequest, kw_only=True):
    """A response's request as that of a conversation."""

    names: ClassVar[dict[str, str]] = {"response_format": "text.format"}


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model thinks."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponsesRequest(Generation, kw_only=True):
    """/v1/responses."""

    names: ClassVar[dict[str, str]] = {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
    }
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    truncation: str | None = None

    def check(self) -> None:
        super().check()
        for name in self.include or ():
            if name != LOGPROBS:
                raise refused("include", name, LOGPROBS)
        if self.top_logprobs and not self.include:
            raise refused("top_logprobs", self.top_logprobs, f"none without {LOGPROBS} in include")
        kind = self.text_format.get("type")
        if kind not in ("text", "json_object", "json_schema") or (
            kind == "json_schema" and "schema" not in self.text_format
        ):
            raise refused("text.format", self.text_format, "text, json_object, or json_schema with a schema")
        if self.text is not None and self.text.keys() - {"format"}:
            raise refused("text", self.text, "a format")
        self.chat().check()

    @property
    def text_format(self) -> dict[str, Any]:
        """What the text of the answer is to be."""
        given = (self.text or {}).get("format") or {"type": "text"}
        return given if isinstance(given, dict) else {}

    def chat(self) -> ChatRequest:
        """The same as a conversation, but for its messages."""
        names = ("name", "description", "parameters", "strict")
        return _Conversation(
            messages=[],
            max_completion_tokens=self.max_output_tokens,
            logprobs=bool(self.include),
            top_logprobs=self.top_logprobs if self.include else None,
            tools=[
                {
                    "type": tool.get("type"),
                    "function": {name: tool[name] for name in names if tool.get(name) is not None},
                }
                for tool in self.tools or ()
            ],
            response_format={"type": self.text_format["type"], "json_schema": self.text_format},
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            **{name: getattr(self, name) for name in (*Generation.__struct_fields__, *_SAME)},
        )

    def messages(self) -> list[dict[str, Any]]:
        """The input as a conversation. Raises ApiError."""
        made = [Message("system", self.instructions)] if self.instructions is not None else []
        given = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        thoughts: str | None = None
        for index, item in enumerate(given):
            field = f"input[{index}]"
            match item.type or "message":
                case "message":
                    content = _content(item.content, f"{field}.content")
                    made.append(Message(item.role or "", content, reasoning_content=thoughts))
                    thoughts = None
                case "reasoning":
                    parts = _content(item.content, f"{field}.content")
                    said = parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)
                    thoughts = _together(thoughts, said)
                case "function_call":
                    call = ToolCall(ToolCallFunction(item.name or "", item.arguments or ""), item.call_id, "function")
                    if made and made[-1].role == "assistant":
                        made[-1].tool_calls = [*(made[-1].tool_calls or []), call]
                        made[-1].reasoning_content = _together(made[-1].reasoning_content, thoughts)
                    else:
                        made.append(Message("assistant", tool_calls=[call], reasoning_content=thoughts))
                    thoughts = None
                case "function_call_output":
                    made.append(Message("tool", _content(item.output, f"{field}.output"), tool_call_id=item.call_id))
                case other:
                    raise refused(f"{field}.type", other, "message, function_call, function_call_output, reasoning")
        return conversation_of(made, "input")


def _together(*thoughts: str | None) -> str | None:
    return "\n".join(filter(None, thoughts)) or None


def _content(content: str | list[Part] | None, field: str) -> str | list[Part]:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content or ()):
        if part.type not in _TEXT_PARTS:
            raise refused(f"{field}[{index}].type", part.type, ", ".join(_TEXT_PARTS))
    return [Part("text", part.text or part.refusal or "") for part in content or ()]


async def responses(call: ApiCall) -> None:
    """Answers a request, with a stream or without."""
    request, state = await call.read(ResponsesRequest)
    chat, forms = request.chat(), call.forms(state)
    options = chat.options(state.sampling_defaults)
    prepare(call, chat, options, forms)
    output = await call.aside(lambda: call.generate(request.messages(), options))
    sample = Sample(chat, options, forms)
    given = {"top_p": 1.0} | (state.sampling_defaults.given if state.sampling_defaults else {}) | options
    answer = _Answer(request, request.model or state.served_names[0], sample, given)
    if request.stream:
        await call.send_stream(answer.stream(output))
        return
    async with aclosing(output) as chunks:
        async for chunk in chunks:
            for _ in answer.read(chunk):
                pass
    await call.send_whole(encode(answer.content()))


class _Answer:
    """A response as it grows, and the events of its growth."""

    def __init__(self, request: ResponsesRequest, model: str, sample: Sample, options: Mapping[str, Any]) -> None:
        """`options`: those that the output has, the server's defaults included."""
        self._sample = sample
        self._items: list[dict[str, Any]] = []
        self._usage: Usage | None = None
        self._number = 0
        self._logprobs: list[dict[str, Any]] = []
        """Of the tokens since the last part of the text."""
        self._fields: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "text": {"format": request.text_format},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
            "metadata": request.metadata or {},
            **{name: options[name] for name in ("temperature", "top_p")},
            **{name: getattr(request, name) for name in _REPEATED},
        }

    def content(self) -> dict[str, Any]:
        """The response now."""
        job, usage = self._usage, None
        if job is not None:
            usage = {
                "input_tokens": job.prompt_tokens,
                "input_tokens_details": {"cached_tokens": job.cached_tokens},
                "output_tokens": job.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._sample.num_reasoning_tokens},
                "total_tokens": job.prompt_tokens + job.completion_tokens,
            }
        return {**self._fields, "output": self._items, "usage": usage}

    async def stream(self, output: AsyncGenerator[OutputChunk, None]) -> AsyncGenerator[bytes, None]:
        """The events of the response."""
        is_begun = False
        async with aclosing(output) as chunks:
            try:
                async for chunk in chunks:
                    begin = [] if is_begun else [self._event("created"), self._event("in_progress")]
                    is_begun = True
                    if events := [*begin, *self.read(chunk)]:
                        yield b"".join(events)
            except SlipstreamError as error:
                if not is_begun:
                    raise
                failed: ApiError = api_error(error, ResponsesRequest.names)
                self._fields |= {"status": "failed", "error": {"code": "server_error", "message": str(failed)}}
                yield self._event("failed")
                return
        yield self._event(self._fields["status"])

    def read(self, chunk: OutputChunk) -> Iterator[bytes]:
        """Takes the next part of the output, and yields its events."""
        for part in token_by_token(chunk) if chunk.logprobs else (chunk,):
            self._logprobs += logprob_items(part.logprobs)
            for delta in self._sample.read(part):
                yield from self._add(delta)
                self._logprobs = []
        self._usage = chunk.job_usage
        if chunk.finish_reason is not None:
            is_whole = chunk.finish_reason is FinishReason.STOP
            status = self._fields["status"] = "completed" if is_whole else "incomplete"
            yield from self._end_item(status)
            if not is_whole:
                reason = "max_output_tokens" if chunk.finish_reason is FinishReason.LENGTH else "cancelled"
                self._fields["incomplete_details"] = {"reason": reason}

    def _add(self, delta: Delta) -> Iterator[bytes]:
        match delta:
            case Call():
                yield from self._end_item()
                fields = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
                yield self._item_event("output_item.added", item=self._begin_item("fc", fields))
            case Arguments():
                self._items[-1]["arguments"] += delta.text
                yield self._item_event("function_call_arguments.delta", item_id=self._items[-1]["id"], delta=delta.text)
            case Content():
                new = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                part = yield from self._part("msg", "message", new)
                part["text"] += delta.text
                part["logprobs"] += self._logprobs
                yield self._item_event("output_text.delta", **self._place, delta=delta.text, logprobs=self._logprobs)
            case Reasoning():
                part = yield from self._part("rs", "reasoning", {"type": "reasoning_text", "text": ""})
                part["text"] += delta.text
                yield self._item_event("reasoning_text.delta", **self._place, delta=delta.text)

    def _part(self, prefix: str, kind: str, new: dict[str, Any]) -> Generator[bytes, None, dict[str, Any]]:
        """The part that is written of the item of this kind, which begins with `new`."""
        if not self._items or self._items[-1]["type"] != kind or self._items[-1]["status"] != "in_progress":
            yield from self._end_item()
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            item = self._begin_item(prefix, {"type": kind, "content": [], **more})
            yield self._item_event("output_item.added", item=item)
            item["content"].append(new)
            yield self._item_event("content_part.added", **self._place, part=new)
        part: dict[str, Any] = self._items[-1]["content"][0]
        return part

    def _begin_item(self, prefix: str, fields: dict[str, Any]) -> dict[str, Any]:
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **fields})
        return self._items[-1]

    def _end_item(self, status: str = "completed") -> Iterator[bytes]:
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            with suppress(msgspec.DecodeError, RecursionError):
                msgspec.json.decode(item["arguments"])
                item["status"] = "completed"
            said = {name: item[name] for name in ("name", "arguments")}
            yield self._item_event("function_call_arguments.done", item_id=item["id"], **said)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._logprobs
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._item_event(f"{part['type']}.done", **self._place, **said)
            yield self._item_event("content_part.done", **self._place, part=part)
        yield self._item_event("output_item.done", item=item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "content_index": 0}

    def _item_event(self, kind: str, /, **fields: Any) -> bytes:
        return self._encoded(kind, {"output_index": len(self._items) - 1, **fields})

    def _event(self, name: str) -> bytes:
        return self._encoded(name, {"response": self.content()})

    def _encoded(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": f"response.{name}", "sequence_number": number, **fields}, name=f"response.{name}")
