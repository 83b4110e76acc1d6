"""The requests of OpenAI's interface. A field that is not here, or would not be honoured, is refused by its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from slipstream.client.requests import RequestOptions
from slipstream.door.errors import ApiError, refused

if TYPE_CHECKING:
    from slipstream.common.wire.server import SamplingDefaults

RequestT = TypeVar("RequestT", bound="Request")

_OURS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "chat_template_kwargs": "template_kwargs",
}
"""Fields that have other names in our interface."""
_HONOURED: dict[str, tuple[tuple[Any, ...], str]] = {
    "service_tier": (("auto", "default"), "auto, default"),
    "store": ((False,), "false: answers are not kept"),
    "background": ((False,), "false: answers are not kept"),
    "previous_response_id": ((), "none: answers are not kept"),
    "truncation": (("disabled",), "disabled"),
    "modalities": ((["text"],), '["text"]'),
    "suffix": (("",), "none: text is not inserted here"),
    "add_special_tokens": ((True,), "true, or a prompt of token ids"),
}
"""Values that are honoured of fields with few, and how an error says so; null is honoured, too."""
_FREE = ("tools", "chat_template_kwargs", "response_format", "structured_outputs", "guided_json", "text")
"""Fields in which null is a value."""
DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI has it."""
MAX_CHOICES = 2048
"""Choices of a request, of all its prompts: each has a state here before the gateway sees the request."""
_OF_A_CONVERSATION = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
"""Fields of /tokenize that say how messages become a text."""
SEED_MASK = 2**64 - 1
MIN_TEMPERATURE = 2e-5
"""A lower one than our interface takes counts as 0, at which the likeliest token is taken."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream has beside the output."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all requests have. Null is absent."""

    names: ClassVar[dict[str, str]] = {}
    """Our names of fields that have other names here than in most requests, and those."""
    model: str | None = None

    def check(self) -> None:
        """Raises ApiError for a value that is not honoured."""


class Generation(Request, kw_only=True):
    """The fields that all requests for an output have."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    # Those that OpenAI does not have.
    top_k: int | None = None
    min_p: float | None = None
    # Those without an effect on the output, as OpenAI's.
    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # Those with few values that are honoured.
    service_tier: str | None = None

    def check(self) -> None:
        for name, (honoured, accepted) in _HONOURED.items():
            given = getattr(self, name, None)
            if given is not None and given not in honoured:
                raise refused(name, given, accepted)


class Sampling(Generation, kw_only=True):
    """The fields that completions and conversations have in common."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Those that OpenAI does not have.
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    max_draft_tokens: int | None = None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", msgspec.to_builtins(self.stream_options), "none without stream")
        for name in ("continuous_usage_stats", "include_obfuscation"):
            if getattr(self.stream_options, name, False):
                raise refused(f"stream_options.{name}", True, "false")
        if self.n is not None and self.n > MAX_CHOICES:
            raise refused("n", self.n, f"at most {MAX_CHOICES} outputs, of all prompts together")

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def options(self, defaults: SamplingDefaults | None) -> RequestOptions:
        """Returns the options of our client for this request. Raises ApiError for a value that is not honoured.

        `defaults`: those of the server, which go before this interface's.
        """
        given = ((_OURS.get(name, name), getattr(self, name)) for name in self.__struct_fields__)
        options = RequestOptions.__annotations__
        found = {name: value for name, value in given if value is not None and name in options}
        own = {"temperature": 1.0} | ({} if defaults is None else defaults.given)
        temperature = own["temperature"] if self.temperature is None else self.temperature
        found["temperature"] = 0.0 if 0 <= temperature < MIN_TEMPERATURE else temperature
        if self.top_k == -1:
            found["top_k"] = 0
        if self.seed is not None:
            found["seed"] = self.seed & SEED_MASK
        return found  # type: ignore[return-value]


class CompletionRequest(Sampling, kw_only=True):
    """/v1/completions."""

    names: ClassVar[dict[str, str]] = {"top_logprobs": "logprobs"}
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refused("best_of", self.best_of, f"{self.n or 1}, as n")
        if self.echo and self.logprobs is not None:
            raise refused("echo", True, "false with logprobs: those of a prompt are not known")
        if not self.prompt or (isinstance(self.prompt, list) and type(self.prompt[0]) is list and [] in self.prompt):
            raise refused("prompt", self.prompt, "a text, token ids, or several texts or lists of token ids")
        if (num_choices := len(self.prompts) * (self.n or 1)) > MAX_CHOICES:
            raise refused("prompt", f"{num_choices} outputs", f"at most {MAX_CHOICES}, of all prompts together")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of the prompts."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    def options(self, defaults: SamplingDefaults | None) -> RequestOptions:
        found = super().options(defaults)
        found.setdefault("max_new_tokens", DEFAULT_MAX_TOKENS)
        if self.logprobs is not None:
            found["logprobs"], found["top_logprobs"] = True, self.logprobs
        return found


class ToolCallFunction(msgspec.Struct):
    """A function and its arguments, in JSON."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A tool that the assistant called."""

    function: ToolCallFunction
    id: str | None = None
    type: str | None = None


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # In answers that are sent back; they say nothing.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def to_ours(self, field: str) -> dict[str, Any]:
        """The message as our client takes it. Raises ApiError."""
        content = self.refusal if self.content is None else self.content
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part.type != "text" or part.text is None:
                raise refused(f"{field}.content[{number}].type", part.type, "text")
        made = {
            "role": self.role,
            "content": content,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning": self.reasoning_content,
            "tool_calls": self.tool_calls or None,
        }
        return {name: msgspec.to_builtins(value) for name, value in made.items() if value is not None}


class ChatRequest(Sampling, kw_only=True):
    """/v1/chat/completions."""

    names: ClassVar[dict[str, str]] = {"max_tokens": "max_completion_tokens"}
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[str] | None = None
    store: bool | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refused("max_tokens", self.max_tokens, "none beside max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", self.top_logprobs, "none without logprobs")
        check_tools(self.tools)

    def options(self, defaults: SamplingDefaults | None) -> RequestOptions:
        found: RequestOptions = {"fills_context": True, **super().options(defaults)}
        if self.reasoning_effort is not None:
            found["template_kwargs"] = {**(self.chat_template_kwargs or {}), "reasoning_effort": self.reasoning_effort}
        if self.tool_choice == "none" or not self.tools:
            found.pop("tools", None)
        return found


class TokenizeRequest(Request, kw_only=True):
    """/tokenize, as vLLM has it."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", self.prompt, "either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise refused("add_special_tokens", True, "false with messages: the chat template writes them")
        for name in _OF_A_CONVERSATION if self.messages is None else ():
            if (given := getattr(self, name)) is not None:
                raise refused(name, given, "none without messages")
        check_tools(self.tools)


class DetokenizeRequest(Request, kw_only=True):
    """/detokenize, as vLLM has it."""

    names: ClassVar[dict[str, str]] = {"prompt": "tokens"}
    tokens: list[int]
    skip_special_tokens: bool | None = None


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    """Raises ApiError for tools that are no functions."""
    for index, tool in enumerate(tools or ()):
        field, function = f"tools[{index}]", tool.get("function")
        if tool.get("type") != "function":
            raise refused(f"{field}.type", tool.get("type"), "function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused(f"{field}.function", function, "an object with a name")


def conversation_of(messages: list[Message], field: str = "messages") -> list[dict[str, Any]]:
    """The messages as our client takes them. Raises ApiError."""
    if not messages:
        raise refused(field, [], "at least one message")
    return [message.to_ours(f"{field}[{index}]") for index, message in enumerate(messages)]


def parse(body: bytes, kind: type[RequestT]) -> RequestT:
    """Reads a request. Raises ApiError naming the field that is wrong."""
    try:
        try:
            request = msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            # A field that is not known here may be null.
            request = msgspec.convert(_without_nulls(msgspec.json.decode(body)), kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(error) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON of an accepted depth: {error}", code="invalid_json") from error
    request.check()
    return request


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        found = {name: given for name, given in value.items() if given is not None}
        return {name: given if name in _FREE else _without_nulls(given) for name, given in found.items()}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _refusal(error: msgspec.ValidationError) -> ApiError:
    message, _, path = str(error).partition(" - at `")
    named = re.search(r"(?:unknown|missing required) field `(.*)`", message)
    within = path.removeprefix("key` in `").removeprefix("$").rstrip("`")
    param = ".".join(filter(None, (within, named[1] if named else ""))).removeprefix(".")
    if "unknown field" in message:
        message = "there is no such field, or it is not supported here"
    return ApiError(400, f"{param or 'body'}: {message}", param=param or None)
