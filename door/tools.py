"""Finds calls of tools in the text of an output, in the forms in which models write them."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Functions: TypeAlias = "Mapping[str, Any]"
"""By name, the functions that may be called."""

_BETWEEN = "}] \n\t;,"
"""What may stand between the arguments of a call and the next one."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text that the assistant says."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a call."""

    name: str
    id: str

    @classmethod
    def of(cls, name: str, *, has_short_id: bool = False) -> Call:
        """Draws an id. Templates of Mistral refuse those that are not short."""
        drawn = uuid.uuid4().hex
        return cls(name, drawn[:9] if has_short_id else f"call_{drawn[:24]}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the newest call's arguments, which are JSON."""

    text: str


Found: TypeAlias = "list[Content | Call | Arguments]"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls."""

    start: str
    """The mark before calls."""
    end: str
    """The mark after a call; empty: calls follow each other, up to the end of the output."""
    begin: re.Pattern[str]
    """The beginning of what is after the mark before calls, of which more may arrive; other text is no call."""
    head: re.Pattern[str] | None
    """What is before arguments that can be sent as they arrive; the last group is the name."""
    end_finder: type[ObjectEnd | _TagsEnd]
    """Finds the end of calls that have another head."""
    read: Callable[[str, Functions], list[tuple[str, str]]]
    """Reads such calls up to that end: names and arguments. Raises ValueError for what is no call."""
    is_first: bool = False
    """Calls may begin the output without a mark."""
    has_short_ids: bool = False


class _State(Enum):
    FIRST = auto()
    """At the beginning of an output that may begin with a call."""
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    AFTER = auto()
    """After the arguments of a call."""


class CallParser:
    """Finds calls in one form; what is none is content. A call is certain when its arguments begin."""

    is_thinking = False

    def __init__(self, form: CallForm, functions: Functions) -> None:
        self._form = form
        self._functions = functions
        self._state = _State.FIRST if form.is_first else _State.TEXT
        self._held = ""
        """Text that is not certain yet."""
        self._before = ""
        """What was read before the head, which is text if no call follows."""
        self._end: ObjectEnd | _TagsEnd = ObjectEnd()
        self._num_read = 0
        """Characters of the held text that the end was looked for in."""
        self._is_after_call = False

    def push(self, text: str) -> Found:
        """Returns what is certain with more text."""
        self._held += text
        steps = {
            _State.FIRST: self._read_first,
            _State.TEXT: self._read_text,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.AFTER: self._read_after,
        }
        found: Found = []
        state = None
        while self._held and state is not self._state:
            state = self._state
            found += steps[state]()
        return found

    def finish(self) -> Found:
        """Returns the rest at the end of the output."""
        held, self._held = self._held, ""
        match self._state:
            case _State.HEAD:
                return self._whole(held)
            case _State.AFTER:
                rest = held.lstrip(_BETWEEN)
                return [] if self._form.end.startswith(rest) else self._said(rest)
        return self._said(held)

    def _read_first(self) -> Found:
        begun = self._held.lstrip()
        if begun.startswith((self._form.start, "{")):
            rest = begun.removeprefix(self._form.start)
            self._begin_head(self._held.removesuffix(rest), rest)
        elif not self._form.start.startswith(begun):
            self._state = _State.TEXT
        return []

    def _read_text(self) -> Found:
        text, mark, rest = self._held.partition(self._form.start)
        certain = (text if mark else held_back(text, self._form.start)).rstrip()
        if mark:
            self._begin_head(text[len(certain) :] + mark, rest)
        else:
            self._held = text[len(certain) :]
        return self._said(certain)

    def _begin_head(self, before: str, rest: str) -> None:
        self._before, self._held = before, rest
        self._state, self._end, self._num_read = _State.HEAD, self._form.end_finder(), 0

    def _read_head(self) -> Found:
        if not self._form.begin.match(self._held):
            self._state = _State.TEXT
            return self._said(self._before)
        head = self._form.head and self._form.head.match(self._held)
        if head and (name := head[head.lastgroup or 0]) in self._functions:
            self._state, self._held, self._end = _State.ARGUMENTS, self._held[head.end() :], ObjectEnd()
            return [Call.of(name, has_short_id=self._form.has_short_ids)]
        begin, self._num_read = self._num_read, len(self._held)
        end = self._end.find(self._held[begin:])
        if end is None:
            return []
        inner, self._held = self._held[: begin + end], self._held[begin + end :]
        return self._whole(inner)

    def _whole(self, text: str) -> Found:
        try:
            calls = self._form.read(text, self._functions)
        except (ValueError, RecursionError):
            self._state = _State.TEXT
            return self._said(self._before + text)
        self._state, self._is_after_call = _State.AFTER, True
        return [
            part
            for name, arguments in calls
            for part in (Call.of(name, has_short_id=self._form.has_short_ids), Arguments(arguments))
        ]

    def _read_arguments(self) -> Found:
        end = self._end.find(self._held)
        arguments, self._held = self._held[:end], "" if end is None else self._held[end:]
        if end is not None:
            self._state, self._is_after_call = _State.AFTER, True
        return [Arguments(arguments)]

    def _read_after(self) -> Found:
        start, end, rest = self._form.start, self._form.end, self._held.lstrip(_BETWEEN)
        if end and rest.startswith(end):
            self._state, self._held = _State.TEXT, rest.removeprefix(end)
        elif rest.startswith((start, "{")):
            self._begin_head("", rest.removeprefix(start))
        elif not (start.startswith(rest) or end.startswith(rest)):
            self._state, self._held = _State.TEXT, rest
        return []

    def _said(self, text: str) -> Found:
        text = text.lstrip() if self._is_after_call else text
        self._is_after_call = self._is_after_call and not text
        return [Content(text)] if text else []


class ObjectEnd:
    """Finds the end of an object of JSON, whatever is before it."""

    _SIGNS = re.compile(r'\\.?|["{}]', re.DOTALL)

    def __init__(self) -> None:
        self.is_in_string = False
        self._depth = 0
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Returns the index after the end, counted from the next part of the text; None if it goes on."""
        begin, self._is_escaped = int(self._is_escaped), self._is_escaped and not text
        for sign in self._SIGNS.finditer(text, begin):
            if sign[0][0] == "\\":
                self._is_escaped = len(sign[0]) == 1
            elif sign[0] == '"':
                self.is_in_string = not self.is_in_string
            elif not self.is_in_string:
                self._depth += 1 if sign[0] == "{" else -1
                if not self._depth:
                    return sign.end()
        return None


class _TagsEnd:
    """Finds the mark after calls of qwen3_coder, outside of the values of their parameters."""

    def __init__(self) -> None:
        self._text = ""
        self._num_marks = 0

    def find(self, text: str) -> int | None:
        """Returns the index after the end, counted from the next part of the text; None if it goes on."""
        begin, self._text = len(self._text), self._text + text
        if _CODER_END not in self._text[max(0, begin - len(_CODER_END)) :] or self._num_marks == _MOST_MARKS:
            return None
        self._num_marks += 1
        found = _CODER_CALLS.match(self._text)
        return found and found.end() - begin


def held_back(text: str, mark: str) -> str:
    """The text without an end that may be the beginning of a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((text[:-length] for length in lengths if text.endswith(mark[:length])), text)


def _object(text: str, functions: Functions) -> list[tuple[str, str]]:
    """Reads an object with a name and arguments, the next of a list perhaps."""
    value = json.loads(text.lstrip("[ \n\t"))
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in functions:
        raise ValueError("no call of a function that there is")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return [(value["name"], _in_json(arguments))]


def _in_json(arguments: dict[str, Any]) -> str:
    """Raises ValueError for what JSON, or a text, cannot have: NaN, half of a surrogate pair."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


NAME = re.compile(r"[^>\s]+")
"""A name in qwen3_coder's calls, of a function or a parameter."""
_CODER_END = "</tool_call>"
_MOST_MARKS = 256
"""Parts of a call with the mark of its end, at each of which all of it is read again."""
_STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*+(?:"|\Z)'
"""A string of JSON, of which more may arrive."""
_VALUE = rf"(?:(?=\s*[\[{{\"])(?:{_STRING}|(?!</parameter>).)*+|(?!\s*[\[{{\"])(?:(?!</parameter>).)*+)"
"""A parameter's value, up to the first mark after it that is in no string of a value that begins as JSON does."""
_PARAMETER = re.compile(rf"<parameter=({NAME.pattern})>\n?({_VALUE})</parameter>", re.DOTALL)
_FUNCTION = re.compile(
    rf"(?:(?!<function=|{_CODER_END}).)*+<function=({NAME.pattern})>"
    rf"((?:<parameter={NAME.pattern}>{_VALUE}</parameter>|(?!</function>|<parameter=).)*+)</function>",
    re.DOTALL,
)
"""The next function that is called, and its parameters."""
_CODER_CALLS = re.compile(rf"(?:{_FUNCTION.pattern})*+(?:(?!<function=|{_CODER_END}).)*+(?={_CODER_END})", re.DOTALL)


def _qwen3_coder(text: str, functions: Functions) -> list[tuple[str, str]]:
    calls, end = list[tuple[str, str]](), 0
    while found := _FUNCTION.match(text, end):
        (name, body), end = found.groups(), found.end()
        if name not in functions:
            raise ValueError("no call of a function that there is")
        parameters = functions[name].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schemas = properties if isinstance(properties, dict) else {}
        arguments = {
            key: _typed(value.removesuffix("\n"), types_of(schemas.get(key), parameters))
            for key, value in _PARAMETER.findall(body)
        }
        calls.append((name, _in_json(arguments)))
    if not calls:
        raise ValueError("no call")
    return calls


MOST_ALTERNATIVES = 256
"""Schemas that are looked at for the types of a parameter."""
_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


def resolved(schema: Any, whole: Any) -> Any:
    """A schema, or the part of the whole one that it refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str):
        return schema
    for name in reference.removeprefix("#/").split("/"):
        whole = whole.get(name) if isinstance(whole, dict) else None
    return whole


def types_of(schema: Any, whole: Any) -> set[str]:
    """The types that a schema names, in its alternatives and in what it refers to; none if any value may stand.

    Of more than MOST_ALTERNATIVES the first count.
    """
    found, seen, ahead = set[str](), set[int](), [schema]
    while ahead and len(seen) < MOST_ALTERNATIVES:
        one = resolved(ahead.pop(), whole)
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        named = one.get("type")
        found |= {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(alternatives := one.get(keyword), list):
                ahead += alternatives[MOST_ALTERNATIVES - 1 :: -1]
    return found


def _typed(value: str, types: set[str]) -> Any:
    """A value in one of its types; the text itself where it has none, or is of no such type."""
    if types <= {"string"}:
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)
    is_text = "string" in types and not isinstance(found, tuple(_TYPES[name] for name in types if name in _TYPES))
    return value if is_text and found is not None else found


_HEAD = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_NAMED = r"\s*(?P<named>[\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)"
_JSON, _JSON_OR_NAMED = (
    re.compile(rf"\s*(?:[\[{{]|\Z{more})") for more in ("", rf"|[\w.-]+\s*(?:\[[^{{]*)?\Z|{_NAMED}")
)
CALL_FORMS = {
    "hermes": CallForm("<tool_call>", "</tool_call>", _JSON, re.compile(_HEAD), ObjectEnd, _object),
    "qwen3_coder": CallForm("<tool_call>", _CODER_END, re.compile(r"\s*(?:<|\Z)"), None, _TagsEnd, _qwen3_coder),
    "mistral": CallForm(
        *("[TOOL_CALLS]", "", _JSON_OR_NAMED, re.compile(rf"\s*\[?{_HEAD}|{_NAMED}"), ObjectEnd, _object),
        has_short_ids=True,
    ),
    "llama3_json": CallForm("<|python_tag|>", "", _JSON, re.compile(_HEAD), ObjectEnd, _object, is_first=True),
}
"""By name, the forms that are found by a `CallParser`."""
