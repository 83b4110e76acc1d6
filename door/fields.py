"""The requests of OpenAI's interface. A field that is not here, or would not be honoured, is refused by its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from slipstream.door.errors import ApiError, refused

if TYPE_CHECKING:
    from slipstream.client.requests import RequestOptions

T = TypeVar("T")

ON_CONSTRAINTS = "none: outputs cannot be constrained here"
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "logit_bias", "priority", "cache_salt", "max_draft_tokens"),
)
"""Fields that have the same names in our interface."""
DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI has it."""
SEED_MASK = 2**64 - 1
MIN_TEMPERATURE = 2e-5
"""A lower one than our interface takes counts as 0, at which the likeliest token is taken."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream has beside the output."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and conversations have in common. Null is absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    # Those that OpenAI does not have.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    max_draft_tokens: int | None = None
    # Those without an effect on the output, as OpenAI's.
    user: str | None = None
    metadata: dict[str, str] | None = None
    # Those with a single value that is honoured.
    service_tier: str | None = None
    response_format: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises ApiError for a value that is not honoured."""
        if self.service_tier not in (None, "auto", "default"):
            raise refused("service_tier", self.service_tier, "auto, default")
        if self.response_format is not None and self.response_format != {"type": "text"}:
            raise refused("response_format", self.response_format, ON_CONSTRAINTS)
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", msgspec.to_builtins(self.stream_options), "none without stream")
        for name in ("continuous_usage_stats", "include_obfuscation"):
            if getattr(self.stream_options, name, False):
                raise refused(f"stream_options.{name}", True, "false")

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def options(self) -> RequestOptions:
        """The same as options of our client. Raises ApiError for a value that is not honoured."""
        found: dict[str, Any] = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        temperature = 1.0 if self.temperature is None else self.temperature
        found["temperature"] = 0.0 if 0 <= temperature < MIN_TEMPERATURE else temperature
        if found.get("top_k", 0) == -1:
            del found["top_k"]
        if self.seed is not None:
            found["seed"] = self.seed & SEED_MASK
        if self.min_tokens is not None:
            found["min_new_tokens"] = self.min_tokens
        if self.ignore_eos:
            found["ignore_eos"] = True
        if self.skip_special_tokens is not None:
            found["skip_special_tokens"] = self.skip_special_tokens
        return found  # type: ignore[return-value]


class CompletionRequest(Sampling):
    """/v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise refused("suffix", self.suffix, "none: text is not inserted here")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refused("best_of", self.best_of, f"{self.n or 1}, as n")
        if self.echo and self.logprobs is not None:
            raise refused("echo", True, "false with logprobs: those of a prompt are not known")
        if self.add_special_tokens is False:
            raise refused("add_special_tokens", False, "true, or a prompt of token ids")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of the prompts. Raises ApiError if there is none."""
        given: Any = self.prompt
        if isinstance(given, str):
            return [given]
        kinds = set(map(type, given))
        if len(kinds) != 1 or [] in given:
            raise refused("prompt", given, "a text, token ids, or several texts or lists of token ids")
        return [given] if kinds == {int} else list(given)

    def options(self) -> RequestOptions:
        found = super().options()
        found["max_new_tokens"] = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
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
        made: dict[str, Any] = {"role": self.role}
        if isinstance(self.content, list):
            for number, part in enumerate(self.content):
                if part.type != "text" or part.text is None:
                    raise refused(f"{field}.content[{number}].type", part.type, "text")
            made["content"] = [{"type": "text", "text": part.text} for part in self.content]
        elif self.content is not None:
            made["content"] = self.content
        elif self.refusal is not None:
            made["content"] = self.refusal
        named = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning": self.reasoning_content}
        made |= {name: value for name, value in named.items() if value is not None}
        if self.tool_calls:
            made["tool_calls"] = msgspec.to_builtins(self.tool_calls)
        return made


class ChatRequest(Sampling):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]]
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
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def check(self) -> None:
        super().check()
        if self.store:
            raise refused("store", True, "false: answers are not kept")
        if self.modalities not in (None, ["text"]):
            raise refused("modalities", self.modalities, '["text"]')
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", self.top_logprobs, "none without logprobs")
        check_tools(self.tools, self.tool_choice)

    def options(self) -> RequestOptions:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refused("max_tokens", self.max_tokens, "none beside max_completion_tokens")
        found = super().options()
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is None:
            found["fills_context"] = True
        else:
            found["max_new_tokens"] = most
        if self.logprobs:
            found["logprobs"], found["top_logprobs"] = True, self.top_logprobs or 0
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        if kwargs:
            found["template_kwargs"] = kwargs
        if self.tools and self.tool_choice != "none":
            found["tools"] = self.tools
        for name in ("add_generation_prompt", "continue_final_message"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        return found


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """/tokenize, as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """/detokenize, as vLLM has it."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


def check_tools(tools: list[dict[str, Any]] | None, tool_choice: Any) -> None:
    """Raises ApiError for tools that are no functions, and for a choice that needs a constrained output."""
    for index, tool in enumerate(tools or ()):
        field, function = f"tools[{index}]", tool.get("function")
        if tool.get("type") != "function":
            raise refused(f"{field}.type", tool.get("type"), "function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refused(f"{field}.function", function, "an object with a name")
        if function.get("strict"):
            raise refused(f"{field}.function.strict", True, "false: outputs cannot be constrained here")
    if tool_choice not in (None, "auto", "none"):
        raise refused("tool_choice", tool_choice, "auto, none: outputs cannot be constrained here")


def conversation_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as our client takes them. Raises ApiError."""
    if not messages:
        raise refused("messages", [], "at least one message")
    fields = [f"messages[{index}]" for index in range(len(messages))]
    return [convert(one, Message, field).to_ours(field) for one, field in zip(messages, fields, strict=True)]


def convert(value: dict[str, Any], kind: type[T], field: str) -> T:
    """Reads a part of a request, in which null is absent. Raises ApiError naming the field that is wrong."""
    try:
        return msgspec.convert({name: given for name, given in value.items() if given is not None}, kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, field) from error


def parse(body: bytes, kind: type[T]) -> T:
    """Reads a request. Raises ApiError naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, "") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON of an accepted depth: {error}", code="invalid_json") from error


def _refusal(error: msgspec.ValidationError, field: str) -> ApiError:
    message, _, path = str(error).partition(" - at `$")
    named = re.search(r"(?:unknown|missing required) field `(.*)`", message)
    param = ".".join(filter(None, (field + path.rstrip("`"), named[1] if named else ""))).removeprefix(".")
    if "unknown field" in message:
        message = "there is no such field, or it is not supported here"
    return ApiError(400, f"{param or 'body'}: {message}", param=param or None)
