"""Constraints of outputs, from the fields of OpenAI's and vLLM's requests and from the choice of tools.

Calls of tools, and an output after thoughts, are structural tags of the gateway: marks of the model's form around JSON,
or around values where the form has no JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.door.errors import refused
from slipstream.door.parsers import thinks
from slipstream.door.tools import NAME, resolved, types_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.door.parsers import Forms

Format: TypeAlias = dict[str, Any]
"""A part of an output, in XGrammar's form of structural tags."""

_OF_VLLM = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The fields of `structured_outputs`; those that begin with `guided_` have the same names."""
_ANY_TEXT: Format = {"type": "any_text"}
_ANY_OBJECT = {"type": "object"}
_NOTHING: Format = {"type": "const_string", "value": ""}
_NO_CALL: dict[str, Format] = {"llama3_json": {"type": "regex", "pattern": r"([^{](?s:.*))?"}}
"""Text that begins no call, by forms in which any text may begin one."""
_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of an output."""

    param: str
    """The field of the HTTP request that asked for it."""
    field: str
    """The field of `slipstream.client.RequestOptions` that takes it."""
    value: Any

    def as_format(self) -> Format:
        """Returns the constraint as a part of an output. Raises ApiError for a structural tag, which is a whole."""
        match self.field:
            case "json_object":
                return _by_schema(_ANY_OBJECT)
            case "choice":
                return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in self.value]}
            case "structural_tag":
                accepted = "a constraint of another kind beside thoughts or tools"
                raise refused(self.param, self.value, accepted)
        key = "pattern" if self.field == "regex" else self.field
        return {"type": self.field, key: self.value}


def constraint_of(request: object) -> Constraint | None:
    """Returns what a request's output keeps to. Raises ApiError for more than one thing, and what is not supported."""
    found = list(_constraints_of(request))
    for more in found[1:]:
        raise refused(more.param, more.value, f"none beside {found[0].param}")
    return found[0] if found else None


def _constraints_of(request: Any) -> Sequence[Constraint]:
    found = []
    for name, value in (request.structured_outputs or {}).items():
        if name not in _OF_VLLM:
            raise refused(f"structured_outputs.{name}", value, ", ".join(_OF_VLLM))
        if value is not None and (name, value) != ("json_object", False):
            found.append((f"structured_outputs.{name}", name, value))
    guided = ((f"guided_{name}", name, getattr(request, f"guided_{name}", None)) for name in _OF_VLLM)
    found += [(param, name, value) for param, name, value in guided if value is not None]
    given, param = request.response_format or {"type": "text"}, request.names.get("response_format", "response_format")
    match given.get("type"):
        case "json_schema":
            inner = given.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if schema is None:
                raise refused(f"{param}.json_schema", inner, "an object with a schema")
            found.append((param, "json", schema))
        case "json_object":
            found.append((param, "json_object", True))
        case "structural_tag":
            found.append((param, "structural_tag", given))
        case other if other != "text":
            raise refused(f"{param}.type", other, "text, json_object, json_schema, structural_tag")
    return [Constraint(param, "json_schema" if name == "json" else name, value) for param, name, value in found]


def chosen_tool(tool_choice: Any) -> str | None:
    """The name of the function that must be called; None if the choice names none. Raises ApiError."""
    if tool_choice in (None, "auto", "none", "required"):
        return None
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "function":
        named = tool_choice.get("function", tool_choice)
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            return str(named["name"])
    raise refused("tool_choice", tool_choice, "auto, none, required, or a function by its name")


def constraint_of_chat(request: Any, kwargs: Mapping[str, Any], forms: Forms) -> Constraint | None:
    """Returns what the answer in a conversation keeps to, thoughts and calls of tools included. Raises ApiError.

    `kwargs`: variables of the template, which may turn thoughts off.
    """
    constraint, tools, thoughts = constraint_of(request), _tools_of(request), _thoughts(forms, kwargs)
    if request.tool_choice not in (None, "auto", "none"):
        if constraint is not None:
            raise refused(constraint.param, constraint.value, "none with a tool_choice that asks for a call")
        return _structural_tag("tool_choice", thoughts, _calls(request, tools, forms, is_strict=True))
    if tools and (constraint is not None or any(tool.get("strict") for tool in tools)):
        if constraint is None and forms.tools in _TRIGGERS:
            # Thoughts are text, too.
            return _structural_tag("tools", None, _triggered(request, tools, forms))
        if constraint is not None and forms.tools == "llama3_json":
            # JSON that may begin with the beginning of a call cannot be told from one.
            accepted = "none beside tools whose calls are JSON without a mark, unless tool_choice is none"
            raise refused(constraint.param, constraint.value, accepted)
        said = _NO_CALL.get(forms.tools, _ANY_TEXT) if constraint is None else constraint.as_format()
        param = "tools" if constraint is None else constraint.param
        calls = _calls(request, tools, forms, is_strict=False)
        return _structural_tag(param, thoughts, _or(calls, _said(said, forms)))
    if constraint is None or thoughts is None:
        return constraint
    return _structural_tag(constraint.param, thoughts, _said(constraint.as_format(), forms))


def _structural_tag(param: str, thoughts: Format | None, answer: Format) -> Constraint:
    whole = answer if thoughts is None else _sequence(thoughts, answer)
    return Constraint(param, "structural_tag", json.dumps({"type": "structural_tag", "format": whole}))


def _tools_of(request: Any) -> list[dict[str, Any]]:
    """The functions that may be called, or must. Raises ApiError."""
    functions = [tool["function"] for tool in request.tools or () if request.tool_choice != "none"]
    name = chosen_tool(request.tool_choice)
    if name is not None and name not in [function["name"] for function in functions]:
        raise refused("tool_choice", name, "the name of one of tools")
    if request.tool_choice == "required" and not functions:
        raise refused("tool_choice", "required", "auto, none without tools")
    return functions if name is None else [function for function in functions if function["name"] == name]


def _thoughts(forms: Forms, kwargs: Mapping[str, Any]) -> Format | None:
    """Returns the part of an output that thoughts may take, before the answer; None if there are none."""
    space = {"type": "regex", "pattern": r"[ \n]{0,4}"}
    match forms.reasoning:
        case "think_open" if thinks(kwargs):
            return _sequence(_tag("", _ANY_TEXT, "</think>"), space)
        case "think" if thinks(kwargs):
            return _or(_NOTHING, _sequence(_tag("<think>", _ANY_TEXT, "</think>"), space))
        case "harmony":
            return _or(_NOTHING, _tag("<|channel|>analysis<|message|>", _ANY_TEXT, "<|end|><|start|>assistant"))
    return None


def _said(content: Format, forms: Forms) -> Format:
    return _tag(_FINAL, content, "") if forms.reasoning == "harmony" else content


_TRIGGERS = {"hermes": "<tool_call>", "qwen3_coder": "<tool_call>", "mistral": "[TOOL_CALLS]"}
"""Forms in which text may be before a call, and the mark by which one begins."""
_CALLS = {
    "hermes": ('<tool_call>\n{{"name": {}, "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": ('{{"name": {}, "parameters": ', "}", "; "),
    "mistral": ('{{"name": {}, "arguments": ', "}", ", "),
    "harmony": ("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", "", ""),
    "qwen3_coder": ("<tool_call>\n<function={}>\n", "</function>\n</tool_call>", "\n"),
}
"""By form: the text before the arguments of a call, the text after them, and the text between two calls."""
_BARE_NAMES = ("harmony", "qwen3_coder")
"""Forms in which a function's name is no JSON."""


def _tags(tools: Sequence[Mapping[str, Any]], forms: Forms, *, is_strict: bool) -> list[Format]:
    """A tag for each function; its schema counts if it is strict, or all are by `is_strict`."""
    begin, end, _ = _CALLS[forms.tools]
    by_schema = _parameters if forms.tools == "qwen3_coder" else _by_schema
    schemas = [((is_strict or tool.get("strict")) and tool.get("parameters")) or _ANY_OBJECT for tool in tools]
    if by_schema is _parameters:
        _check_copies(schemas)
    names = [tool["name"] for tool in tools]
    shown = names if forms.tools in _BARE_NAMES else [json.dumps(name, ensure_ascii=False) for name in names]
    return [_tag(begin.format(name), by_schema(schema), end) for name, schema in zip(shown, schemas, strict=True)]


MAX_COPIED_CHARACTERS = 2**20
"""Characters of the definitions of all tools, with a copy for each parameter."""
_OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXT = {"type", "enum", "const"}
_ANNOTATIONS = {"$schema", "$id", "title", "description", "default", "examples"}


def _parameters(schema: Any) -> Format:
    """The arguments of a call as parameters by name: texts as they are, other values in JSON. Raises ApiError."""
    properties = _checked(schema, _OF_OBJECT, "parameters").get("properties")
    if properties is None:
        any_name = {"type": "regex", "pattern": NAME.pattern}
        one = _tag("<parameter=", _sequence(any_name, _value(_ANY_TEXT)), "")
        return {"type": "tags_with_separator", "tags": [one], "separator": ""}
    shared, required = _shared(schema), schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refused("tools.parameters.required", required, "a list of names")
    found, needed = [_NOTHING], frozenset(required)
    for name, given in _object(properties, "parameters.properties").items():
        path = f"parameters.properties.{name}"
        if not NAME.fullmatch(name):
            raise refused(f"tools.{path}", name, "a name without spaces and >, as calls of this model have it")
        value = _by_schema({**_object(given, path), **shared})
        if types_of(given, schema) <= {"string"}:
            text = _checked(resolved(given, schema), _OF_TEXT, path)
            if text.get("type", "string") not in ("string", ["string"]):
                raise refused(f"tools.{path}.type", text["type"], "the name of a type, or a list of names")
            texts = text.get("enum", [text["const"]] if "const" in text else None)
            value = _ANY_TEXT if texts is None else _one_of(texts, path)
        one = _sequence({"type": "const_string", "value": f"<parameter={name}"}, _value(value))
        found.append(one if name in needed else _or(_NOTHING, one))
    return _sequence(*found)


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The definitions that the schemas of parameters refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _check_copies(schemas: Sequence[Any]) -> None:
    """Raises ApiError where the definitions, of which each parameter's schema gets a copy, take too much memory."""
    pairs = [(one, one.get("properties")) for one in schemas if isinstance(one, dict)]
    size = sum(len(json.dumps(_shared(one))) * len(names) for one, names in pairs if isinstance(names, dict))
    if size > MAX_COPIED_CHARACTERS:
        accepted = f"at most {MAX_COPIED_CHARACTERS} in all"
        raise refused("tools", f"{size} characters of definitions, a copy for each parameter", accepted)


def _value(content: Format) -> Format:
    """The value of a parameter, after its name. A text ends at the first mark of its end."""
    if content["type"] == "json_schema":
        content = _sequence(content, {"type": "const_string", "value": "\n"})
    return _sequence(_tag(">\n", content, "</parameter>"), {"type": "const_string", "value": "\n"})


def _one_of(texts: Any, path: str) -> Format:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise refused(f"tools.{path}", texts, "texts, or a type")
    return _or(*({"type": "const_string", "value": f"{text}\n"} for text in texts))


def _checked(schema: Any, known: set[str], path: str) -> dict[str, Any]:
    for keyword in sorted(_object(schema, path).keys() - known - _ANNOTATIONS):
        raise refused(
            f"tools.{path}.{keyword}", schema[keyword], "none, as arguments of this model's calls are no JSON"
        )
    return dict(schema)


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(f"tools.{path}", value, "an object")
    return value


def _by_schema(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _calls(request: Any, tools: Sequence[Mapping[str, Any]], forms: Forms, *, is_strict: bool) -> Format:
    """One call or several, one after the other."""
    has_one = (
        request.parallel_tool_calls is False or forms.tools == "harmony" or chosen_tool(request.tool_choice) is not None
    )
    tags = {
        "type": "tags_with_separator",
        "tags": _tags(tools, forms, is_strict=is_strict),
        "separator": _CALLS[forms.tools][2],
        "at_least_one": True,
        "stop_after_first": has_one,
    }
    if forms.tools != "mistral":
        return tags
    space = {"type": "regex", "pattern": r" ?\["}
    return _tag("[TOOL_CALLS]", _sequence(space, tags, {"type": "const_string", "value": "]"}), "")


def _triggered(request: Any, tools: Sequence[Mapping[str, Any]], forms: Forms) -> Format:
    """Text in which calls begin at a mark."""
    is_list = forms.tools == "mistral"
    return {
        "type": "triggered_tags",
        "triggers": [_TRIGGERS[forms.tools]],
        "tags": [_calls(request, tools, forms, is_strict=False)] if is_list else _tags(tools, forms, is_strict=False),
        "stop_after_first": is_list or request.parallel_tool_calls is False,
    }


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}
