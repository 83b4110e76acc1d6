"""The requests of both clients, and the reading of their answers."""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor

from slipstream.common.errors import (
    CancelledError,
    ConnectionLostError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.address import CONNECT_TIMEOUT_S, Keepalive, proxy_options
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.job import OutputChunk
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.rpc.address import ChannelOption

logger = logging.getLogger(__name__)

RECONNECT_S = 75.0
"""Default time for which a client tries to get a lost connection back, or a server that ends and comes back to take a
job: it gives the jobs that run 30 s before it ends, and starts in some seconds."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

_Request = TypeVar("_Request")


Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]]"
"""A text, token ids, or a conversation for the model's chat template.

Its messages have a "role" and a "content", a text or text parts, and may have "tool_calls", a "tool_call_id", a "name"
and a "reasoning", as OpenAI's.
"""


class ChatOptions(TypedDict, total=False):
    """The fields of a conversation beside its messages, as in generation.proto; None takes the server's default."""

    tools: Sequence[Mapping[str, Any]] | None
    """Tools that the model may call."""
    template_kwargs: Mapping[str, Any] | None
    """Other variables of the template."""
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class ConstraintOptions(TypedDict, total=False):
    """The constraint of an output: at most one of these fields, as in generation.proto."""

    json_schema: str | Mapping[str, Any] | None
    """A schema, in JSON or as it is loaded from there."""
    json_object: bool | None
    """True: any JSON object."""
    regex: str | None
    grammar: str | None
    """Lark or GBNF."""
    choice: Sequence[str] | None
    """Texts to choose from."""
    structural_tag: str | Mapping[str, Any] | None
    """In JSON or as it is loaded from there."""


class RequestOptions(ChatOptions, ConstraintOptions, total=False):
    """The fields of a request beside its prompt, as in generation.proto; None takes the server's default."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    fills_context: bool
    """Without `max_new_tokens`: as many as the context has room for."""
    skip_special_tokens: bool | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: bool
    top_logprobs: int | None
    speculation: bool | None
    """False turns drafts off for the request."""
    max_draft_tokens: int | None
    """Most draft tokens that are accepted in a step."""
    priority: int | None
    """Requests of a higher one start first."""
    cache_salt: str | None
    """Requests of different salts share nothing of the prefix cache."""


def channel_options(
    address: str, keepalive: Keepalive | None, connect_timeout_s: float = CONNECT_TIMEOUT_S
) -> list[ChannelOption]:
    """Returns the arguments of a client's channel to `address`."""
    pauses: list[ChannelOption] = [
        ("grpc.initial_reconnect_backoff_ms", int(1000 * FIRST_PAUSE_S)),
        # Its name says a pause between two attempts; gRPC lets an attempt take that long.
        ("grpc.min_reconnect_backoff_ms", int(1000 * min(connect_timeout_s, CONNECT_TIMEOUT_S))),
        ("grpc.max_reconnect_backoff_ms", int(1000 * LONGEST_PAUSE_S)),
    ]
    unlimited: list[ChannelOption] = [("grpc.max_receive_message_length", -1)]
    return [*(keepalive or Keepalive()).options(), *pauses, *unlimited, *proxy_options(address)]


def job_request(kind: type[_Request], prompt: Prompt, job_id: str, options: RequestOptions) -> _Request:
    """Builds a GenerateRequest or a CreateJobRequest. Raises InvalidArgumentError naming a field of the wrong type."""
    sampling: dict[str, Any] = {**options}
    speculation = {
        "enabled": sampling.pop("speculation", None),
        "max_draft_tokens": sampling.pop("max_draft_tokens", None),
    }
    if isinstance(sampling.get("stop"), str):
        # A string is a sequence of strings, too.
        sampling["stop"] = [sampling["stop"]]
    chat = {name: sampling.pop(name) for name in ChatOptions.__annotations__ if name in sampling}
    constraint = _constraint_field({name: sampling.pop(name, None) for name in ConstraintOptions.__annotations__})
    fields = (
        _prompt_field(prompt, chat)
        | constraint
        | {name: sampling.pop(name, None) for name in ("priority", "cache_salt")}
    )
    if any(value is not None for value in speculation.values()):
        fields["speculation"] = build(generation_pb2.Speculation, within="speculation.", **speculation)
    params = build(generation_pb2.SamplingParams, within="sampling_params.", **sampling)
    return build(kind, job_id=job_id, sampling_params=params, **fields)


def tokenize_request(
    prompt: str | Sequence[Mapping[str, Any]], add_special_tokens: bool | None, chat: ChatOptions
) -> generation_pb2.TokenizeRequest:
    """Builds the request. Raises InvalidArgumentError naming a field of the wrong type."""
    field = _prompt_field(prompt, chat)
    return build(generation_pb2.TokenizeRequest, add_special_tokens=add_special_tokens, **field)


def detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool) -> generation_pb2.DetokenizeRequest:
    """Builds the request. Raises InvalidArgumentError naming a field of the wrong type."""
    ids = build(generation_pb2.TokenIds, within="input_ids.", ids=token_ids)
    return build(generation_pb2.DetokenizeRequest, input_ids=ids, skip_special_tokens=skip_special_tokens)


def _prompt_field(prompt: Prompt, chat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field of a request that has the prompt; `chat`: the options of a conversation."""
    is_chat = (
        not isinstance(prompt, str) and isinstance(prompt, Sequence) and isinstance(next(iter(prompt), 0), Mapping)
    )
    if not is_chat:
        for name, value in chat.items():
            if value is not None:
                raise InvalidArgumentError(name, value, "none beside a prompt that is no conversation")
    if isinstance(prompt, str):
        return {"text": prompt}
    # Bytes are a sequence of integers, too.
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Sized):
        accepted = "a text, token ids, or a conversation: a list of messages with a role and a content"
        raise InvalidArgumentError("prompt", prompt, accepted)
    if is_chat:
        return {"messages": _conversation(prompt, chat)}  # type: ignore[arg-type]
    return {"input_ids": build(generation_pb2.TokenIds, within="input_ids.", ids=prompt)}


def _constraint_field(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field of a request that has the constraint. Raises InvalidArgumentError for more than one."""
    found = {name: value for name, value in given.items() if value is not None}
    for name in list(found)[1:]:
        raise InvalidArgumentError(name, found[name], f"none beside {next(iter(found))}: an output has one constraint")
    for name in ("json_schema", "structural_tag"):
        if isinstance(found.get(name), Mapping | bool):
            found[name] = json.dumps(found[name])
    if "choice" in found:
        items = found["choice"]
        if isinstance(items, str):
            raise InvalidArgumentError("choice", items, "a list of texts")
        found["choice"] = build(generation_pb2.Choices, within="choice.", items=items)
    return found


def _conversation(messages: Sequence[Mapping[str, Any]], chat: Mapping[str, Any]) -> generation_pb2.ChatMessages:
    kwargs = chat.get("template_kwargs")
    return build(
        generation_pb2.ChatMessages,
        within="messages.",
        items=[_message(message, f"messages.items[{index}].") for index, message in enumerate(messages)],
        tools=[json.dumps(tool) for tool in chat.get("tools") or ()],
        template_kwargs=None if kwargs is None else json.dumps(kwargs),
        add_generation_prompt=chat.get("add_generation_prompt"),
        continue_final_message=chat.get("continue_final_message"),
    )


def _message(message: Mapping[str, Any], field: str) -> generation_pb2.ChatMessage:
    given = dict(message)
    content = given.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        del given["content"]
        given["content_parts"] = [_text_of(part, f"{field}content[{number}]") for number, part in enumerate(content)]
    calls = given.pop("tool_calls", None) or ()
    given["tool_calls"] = [_tool_call(call, f"{field}tool_calls[{number}]") for number, call in enumerate(calls)]
    return build(generation_pb2.ChatMessage, within=field, **given)


def _text_of(part: Any, field: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidArgumentError(field, part, 'a part of the type "text" with a text')
    text: str = part["text"]
    return text


def _tool_call(call: Any, field: str) -> generation_pb2.ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidArgumentError(field, call, "a call with a function")
    arguments = function.get("arguments") or ""
    return build(
        generation_pb2.ToolCall,
        within=f"{field}.",
        id=call.get("id") or "",
        name=function.get("name"),
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def build(kind: type[_Request], *, within: str = "", **values: Any) -> _Request:
    """Builds a message. Raises InvalidArgumentError naming the field, after `within`, of a value of the wrong type."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        name, value = _wrong_field(kind, values)
        if name not in kind.DESCRIPTOR.fields_by_name:  # type: ignore[attr-defined]
            raise InvalidArgumentError.described(within + name, "there is no such field") from error
        raise InvalidArgumentError(within + name, value, f"{_accepted(kind, name)} ({error})") from error


def _wrong_field(kind: type[Any], values: Mapping[str, Any]) -> tuple[str, object]:
    for name, value in values.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError):
            return name, value
    raise AssertionError(f"each field of a {kind.__name__} can be set, but not all together")


_WHOLE_NUMBERS = {
    FieldDescriptor.CPPTYPE_UINT32: "0 to 2^32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "0 to 2^64 - 1",
    FieldDescriptor.CPPTYPE_INT32: "-2^31 to 2^31 - 1",
}
_OTHER_TYPES = {
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a text",
}


def _accepted(kind: type[Any], name: str) -> str:
    """The values that a field takes, in words."""
    field = kind.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "a mapping of token ids to numbers"
    whole = _WHOLE_NUMBERS.get(field.cpp_type)
    if field.is_repeated:
        return f"a list of whole numbers of {whole}" if whole else "a list of texts"
    return f"a whole number of {whole}" if whole else _OTHER_TYPES.get(field.cpp_type, "as generation.proto says")


class OutputReader:
    """Reads the messages of one job's output, over any number of calls, and checks that no token is left out."""

    def __init__(self, from_token: int | Sequence[int] = 0, *, attempt: int = 0, keeps_tokens: bool = False) -> None:
        """`from_token`: number of tokens that the caller has, of the first sample or, in order, of each.

        `attempt`: the job's attempt that they are of; 0 is any. `keeps_tokens`: for `continued`.
        """
        offsets = [from_token] if isinstance(from_token, int) else from_token
        self.is_over = False
        """True if the job's last message has arrived."""
        self._attempt = attempt
        self._job_id = ""
        self._offsets = dict(enumerate(offsets))
        self._finished: set[int] = set()
        self._tokens: defaultdict[int, array[int]] | None = defaultdict(partial(array, "I")) if keeps_tokens else None

    @property
    def has_attempt(self) -> bool:
        """True once the server that is called now has sent output."""
        return self._attempt != 0

    @property
    def has_output(self) -> bool:
        """True once a server has sent tokens."""
        return any(self._offsets.values())

    def watch_request(self, job_id: str) -> generation_pb2.WatchJobRequest:
        """Builds the request for the rest of a job's output."""
        offsets = self._offsets_in_order()
        field = {"from_token": offsets[0]} if len(offsets) == 1 else {"from_tokens": offsets}
        return build(generation_pb2.WatchJobRequest, job_id=job_id, attempt=self._attempt, **field)

    def resumed(self, request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateRequest:
        """The request again, for the rest of the output of the job that the server may have named."""
        request.ClearField("delivery")
        if self._attempt:
            request.job_id = self._job_id
            resume = generation_pb2.Resume(from_tokens=self._offsets_in_order(), attempt=self._attempt)
            request.resume.CopyFrom(resume)
        return request

    def continued(self, request: generation_pb2.GenerateRequest) -> None:
        """Has the request go on, at a server that does not know its job, after the tokens that have arrived."""
        request.ClearField("resume")
        self._attempt = 0
        if self.has_output:
            assert self._tokens is not None, "a reader whose request may move keeps the tokens"
            request.ClearField("job_id")
            outputs = [generation_pb2.TokenIds(ids=self._tokens[index]) for index in range(max(self._offsets) + 1)]
            found = generation_pb2.Continuation(outputs=outputs, seed=request.sampling_params.seed)
            request.continuation.CopyFrom(found)

    def _offsets_in_order(self) -> list[int]:
        return [self._offsets.get(index, 0) for index in range(max(self._offsets, default=0) + 1)]

    def read(self, message: generation_pb2.GenerateResponse) -> OutputChunk | None:
        """Returns the next chunk; None for a repeated end. Raises InternalError for tokens left out or repeated."""
        chunk = OutputChunk.from_pb(message)
        sample, expected = chunk.sample_index, self._offsets.get(chunk.sample_index, 0)
        if chunk.token_offset != expected or (chunk.token_ids and sample in self._finished):
            of = f" of sample {sample}" if sample else ""
            raise InternalError(f"token {expected}{of} was expected, token {chunk.token_offset} arrived")
        self._offsets[sample] = expected + len(chunk.token_ids)
        if self._tokens is not None:
            self._tokens[sample].extend(chunk.token_ids)
        self._attempt, self._job_id = chunk.attempt, chunk.job_id
        self.is_over = chunk.job_usage is not None
        if sample in self._finished:
            # A new call repeats the end of a sample, perhaps with the job's end.
            if not self.is_over:
                return None
            return OutputChunk(
                job_id=chunk.job_id,
                token_offset=expected,
                sample_index=sample,
                job_usage=chunk.job_usage,
                attempt=chunk.attempt,
            )
        if chunk.finish_reason is not None:
            self._finished.add(sample)
        return chunk

    def check_end(self) -> None:
        """Raises ConnectionLostError when the stream ended before the job did."""
        if not self.is_over:
            raise ConnectionLostError("the stream ended before the job did")


def can_go_on_after(error: SlipstreamError) -> bool:
    """True if the rest of a job's output can be asked for: the job lives, or goes on with the same request again."""
    match error:
        case ConnectionLostError():
            return True
        case UnavailableError():
            return error.retry_after_ms is not None
        case ResourceExhaustedError():
            # A client that did not read for a while is cut off. A full queue names a time, a message too large none.
            return error.retry_after_ms == 0
        case _:
            return False


@dataclass(slots=True)
class FirstContact:
    """Whether a client's server has ever answered, and for how long it is tried until then."""

    address: str
    timeout_s: float
    is_made: bool = False

    @contextmanager
    def our_errors(self) -> Iterator[None]:
        """Takes note of the end of a call, and raises its error as the server raised it.

        Names the address in a ConnectionLostError while the server has never answered.
        """
        try:
            yield
        except grpc.RpcError as error:
            found = error_from_rpc(error)
            is_local = isinstance(found, (ConnectionLostError, DeadlineExceededError, CancelledError))
            self.is_made = self.is_made or not is_local
            if isinstance(found, ConnectionLostError) and not self.is_made:
                found = ConnectionLostError(f"no answer from a server at {self.address}: {found}")
            raise found from error
        self.is_made = True


class Reconnection:
    """Decides how long, and how often, to try again. Begins anew after each message."""

    def __init__(self, contact: FirstContact, reconnect_s: float, timeout_s: float | None) -> None:
        """Tries for `reconnect_s` after a failure, or as `contact` says for a server that has never answered.

        All calls together take `timeout_s` at most.
        """
        self.contact = contact
        """That of the server which is called now."""
        self._reconnect_s = reconnect_s
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost_at: float | None = None
        self._pause_s = FIRST_PAUSE_S

    @property
    def time_left_s(self) -> float | None:
        """Timeout of the next call."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def on_message(self) -> None:
        """Called after each message: the connection works."""
        self.contact.is_made = True
        self._lost_at, self._pause_s = None, FIRST_PAUSE_S

    def pause_after(self, error: SlipstreamError, *, can_wait: bool = False) -> float:
        """Returns the seconds to wait before the next try. Raises the error if there should be none.

        `can_wait`: whether a full queue is a reason to try again.
        """
        contact = self.contact
        if not (can_go_on_after(error) or (can_wait and isinstance(error, ResourceExhaustedError))):
            raise error
        now = time.monotonic()
        limit_s = self._reconnect_s if contact.is_made else contact.timeout_s
        if self._lost_at is None:
            self._lost_at = now
            lost = "lost the connection" if contact.is_made else "no answer yet"
            why = lost if isinstance(error, ConnectionLostError) else error
            logger.info("%s: trying %s for %g s", why, contact.address, limit_s)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        if now + pause_s > self._lost_at + limit_s:
            raise error
        return pause_s if self.time_left_s is None else min(pause_s, self.time_left_s)
