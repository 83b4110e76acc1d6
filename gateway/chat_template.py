"""Turns conversations into text by the model's chat template, as transformers does.

A template is a program of the model's, which may loop or allocate without end: it runs in a process of its own, whose
time and memory are bounded.
"""

from __future__ import annotations

import atexit
import json
import re
from contextlib import suppress
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.common.errors import InvalidArgumentError
from slipstream.gateway.bounded_process import BoundedProcess, answer_all, bound_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slipstream.protos import generation_pb2

ROLES = ("system", "developer", "user", "assistant", "tool")

RENDER_TIMEOUT_S = 5.0
"""Time that a template may take for a conversation."""
MAX_MEMORY_BYTES = 2**30
"""Address space of the process that renders."""
MAX_TEXT_BYTES = 32 * 2**20
"""A longer text is refused; no request is as long."""

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the last message, where the text is cut that it continues. The name is that of transformers."""
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
_GOES_THROUGH_PARTS = re.compile(r"for\s+\w+\s+in\s+[\w.\[\]'\"]*content\b")
_TOOL_FORMATS = {
    "harmony": r"<\|channel\|>",
    "qwen3_coder": r"<function=",
    "hermes": r"<tool_call>",
    "mistral": r"\[TOOL_CALLS\]",
    "llama3_json": r"<\|python_tag\|>|ipython",
}
"""Marks that a template of this form writes; the first found counts."""


class PromptTokenizer(Protocol):
    """The part of a tokenizer, ours or one of transformers, that reads prompts."""

    chat_template: Any
    """Source of the template, of several by name; None if the model has none."""
    special_tokens_map: Mapping[str, str]
    """Variables of a template: the names of the model's special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the model's tokenizer adds of its own accord or without them."""
        ...


class TemplateError(Exception):
    """A template does not take a conversation; the message is one line."""


def template_for(templates: Any, *, has_tools: bool) -> str | None:
    """Chooses among the templates of a tokenizer: one, several by name, or None. Raises TemplateError."""
    if not isinstance(templates, dict):
        return templates if templates is None else str(templates)
    for name in (*(("tool_use",) if has_tools else ()), "default"):
        if name in templates:
            return str(templates[name])
    raise TemplateError(f"the model has the templates {', '.join(sorted(templates))}, and none is the default")


def formats_of(templates: Any, special_tokens: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str]:
    """Returns the forms of calls of tools, and of the assistant's thoughts, that a tokenizer's templates write.

    `special_tokens`: variables of the templates.
    """
    sources = list(templates.values()) if isinstance(templates, dict) else [templates or ""]
    source = "\n".join(map(str, sources))
    if not names_variable(source, "tools"):
        tools = "harmony" if re.search(_TOOL_FORMATS["harmony"], source) else ""
    else:
        tools = next((name for name, mark in _TOOL_FORMATS.items() if re.search(mark, source)), "")
    if tools == "harmony" or "</think>" not in source:
        return tools, "harmony" if tools == "harmony" else ""
    return tools, "think_open" if _opens_thoughts(templates, special_tokens) else "think"


def _opens_thoughts(templates: Any, special_tokens: Mapping[str, str]) -> bool:
    """True if the beginning of an answer, as a template writes it, is that of thoughts."""
    own = {"messages": [{"role": "user", "content": "a"}], "tools": None, "add_generation_prompt": True}
    variables = {**special_tokens, **own}
    with suppress(TemplateError):
        return render(template_for(templates, has_tools=False) or "", variables).rstrip().endswith("<think>")
    return False


def names_variable(source: str, name: str) -> bool:
    """True if a template may use a variable of this name."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", source) is not None


def render_messages(messages: generation_pb2.ChatMessages, tokenizer: PromptTokenizer) -> str:
    """Returns the text of a conversation. Raises InvalidArgumentError naming the field that cannot be honoured."""
    if not messages.items:
        raise InvalidArgumentError("messages.items", [], "at least one message")
    for index, message in enumerate(messages.items):
        if message.role not in ROLES:
            raise InvalidArgumentError(f"messages.items[{index}].role", message.role, ", ".join(ROLES))
    try:
        source = template_for(tokenizer.chat_template, has_tools=bool(messages.tools))
        if source is None:
            accepted = "text or input_ids: the model has no chat template"
            raise InvalidArgumentError("messages", f"{len(messages.items)} messages", accepted)
        return render(source, _variables(messages, source, tokenizer), continues=messages.continue_final_message)
    except TemplateError as error:
        description = f"the model's chat template does not take them: {error}"
        raise InvalidArgumentError.described("messages", description) from error


def _variables(messages: generation_pb2.ChatMessages, source: str, tokenizer: PromptTokenizer) -> dict[str, Any]:
    if messages.tools and not names_variable(source, "tools"):
        raise InvalidArgumentError("messages.tools", f"{len(messages.tools)} tools", "none: the chat template has none")
    adds_prompt = not messages.continue_final_message
    if messages.HasField("add_generation_prompt"):
        adds_prompt = messages.add_generation_prompt
        if adds_prompt and messages.continue_final_message:
            raise InvalidArgumentError("messages.add_generation_prompt", True, "false with continue_final_message")
    more = _json_object(messages.template_kwargs, "messages.template_kwargs") if messages.template_kwargs else {}
    for name in more:
        if name in _OWN_VARIABLES or not names_variable(source, name):
            raise InvalidArgumentError(f"messages.template_kwargs.{name}", more[name], "variables of the chat template")
    return {
        **tokenizer.special_tokens_map,
        **more,
        "messages": [_message(message, index, source) for index, message in enumerate(messages.items)],
        "tools": [_json_object(tool, f"messages.tools[{index}]") for index, tool in enumerate(messages.tools)] or None,
        "documents": None,
        "add_generation_prompt": adds_prompt,
    }


def _message(message: generation_pb2.ChatMessage, index: int, source: str) -> dict[str, Any]:
    field = f"messages.items[{index}]"
    is_system = message.role == "developer" and "developer" not in source
    made: dict[str, Any] = {"role": "system" if is_system else message.role}
    if message.content_parts:
        if message.HasField("content"):
            raise InvalidArgumentError(f"{field}.content_parts", f"{len(message.content_parts)} parts", "or content")
        parts = [{"type": "text", "text": text} for text in message.content_parts]
        made["content"] = parts if _GOES_THROUGH_PARTS.search(source) else "\n".join(message.content_parts)
    else:
        made["content"] = None if message.tool_calls and not message.HasField("content") else message.content
    for name, key in (("tool_call_id", "tool_call_id"), ("name", "name"), ("reasoning", "reasoning_content")):
        if value := getattr(message, name):
            made[key] = value
    if message.tool_calls:
        made["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
        ]
    return made


def _tool_call(call: generation_pb2.ToolCall, field: str) -> dict[str, Any]:
    arguments = _json_object(call.arguments, f"{field}.arguments") if call.arguments else {}
    named = {"id": call.id} if call.id else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _json_object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, text, f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, text, "a JSON object")
    return value


def render(source: str, variables: Mapping[str, Any], *, continues: bool = False) -> str:
    """Renders a template. `continues`: the text ends with the last message's. Raises TemplateError."""
    try:
        answer = _renderer().ask({"source": source, "variables": dict(variables), "continues": continues})
    except RecursionError as error:
        raise TemplateError("they are nested too deeply") from error
    if answer is None:
        raise TemplateError(f"it takes longer than {RENDER_TIMEOUT_S:g} s, or more memory than it may")
    if "text" not in answer:
        raise TemplateError(answer["error"])
    text = str(answer["text"])
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise TemplateError("their text has half of a surrogate pair, as \\ud83d, which is no character")
    return text


@cache
def _renderer() -> BoundedProcess:
    process = BoundedProcess(__name__)
    atexit.register(process.end)
    return process


def _answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": _render(**request)}
    except MemoryError:
        return {"error": f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:
        # A template may raise anything.
        return {"error": " ".join(str(error).split()) or type(error).__name__}


def _render(source: str, variables: dict[str, Any], continues: bool) -> str:
    text: str = _continued(source, variables) if continues else _compiled(source).render(**variables)
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"its text has {len(text)} characters, at most {MAX_TEXT_BYTES}")
    return text


def _continued(source: str, variables: dict[str, Any]) -> str:
    last = variables["messages"][-1]
    content = last.get("content")
    if isinstance(content, list):
        final = content[-1]["text"]
        content[-1]["text"] += _CONTINUED
    elif content is None:
        raise ValueError("the last message has no content to continue")
    else:
        final = content
        last["content"] += _CONTINUED
    text: str = _compiled(source).render(**variables)
    if final.strip() not in text or _CONTINUED.strip() not in text:
        raise ValueError("the last message's content is not in its text")
    place = text.rindex(_CONTINUED.strip())
    if text[place : place + len(_CONTINUED)] == _CONTINUED:
        return text[:place]
    return text[:place].rstrip()  # the template strips the content's end, and with it that of the mark


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    from datetime import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Takes the tag of transformers around what an assistant says, which is of use in training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            """Keeps the block's content."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


if __name__ == "__main__":
    bound_memory(MAX_MEMORY_BYTES)
    answer_all(_answer, seconds=RENDER_TIMEOUT_S)
