"""The forms in which models write calls of tools."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Found: TypeAlias = "str | tuple[str, str]"
"""Text, or the name of a function and its arguments in JSON."""
Functions: TypeAlias = "Mapping[str, Any]"
"""By name, the functions that may be called."""

_NO_CALL = (ValueError, RecursionError)
_DECODER = json.JSONDecoder()


class UnfinishedError(ValueError):
    """What was read may be the beginning of a call."""


class MarkedCalls:
    """Calls after a mark, or between two."""

    def __init__(
        self, functions: Functions, start: str, end: str | None, read: Callable[[str, Functions], list[tuple[str, str]]]
    ) -> None:
        """`read` reads what is between the marks; it raises ValueError for what is no call."""
        self._functions = functions
        self._start, self._end, self._read = start, end, read
        self._held = ""
        """Text that may belong to a call, or white space that may be before one."""
        self._space = ""
        """White space before the mark, which is dropped with a call."""
        self._is_within = False
        self._is_after_call = False

    def push(self, text: str) -> list[Found]:
        """Returns what is certain with more text."""
        self._held += text
        found: list[Found] = []
        while True:
            if not self._is_within:
                before, mark, rest = self._held.partition(self._start)
                if not mark:
                    certain = self._certain(before)
                    self._held = before[len(certain) :]
                    return [*found, *self._said(certain)]
                text = before.rstrip()
                self._is_within, self._held, self._space = True, rest, before[len(text) :]
                found += self._said(text)
            block = self._block()
            if block is None:
                return found
            found += block

    def finish(self) -> list[Found]:
        """Returns the rest at the end of the output."""
        held, self._held = self._held, ""
        if not self._is_within:
            return self._said(held)
        try:
            return list(self._read(held, self._functions))
        except _NO_CALL:
            return self._said(self._space + self._start + held)

    def _block(self) -> list[Found] | None:
        """Takes the calls before the end mark; None if it has not come."""
        if self._end is None:
            return None
        place = self._held.find(self._end)
        while place >= 0:
            inner, rest = self._held[:place], self._held[place + len(self._end) :]
            try:
                calls = self._read(inner, self._functions)
            except UnfinishedError:
                # The mark is part of an argument.
                place = self._held.find(self._end, place + 1)
                continue
            except _NO_CALL:
                self._is_within, self._held = False, rest
                return self._said(self._space + self._start + inner + self._end)
            self._is_within, self._is_after_call, self._held = False, True, rest
            return list(calls)
        return None

    def _said(self, text: str) -> list[Found]:
        text = text.lstrip() if self._is_after_call else text
        self._is_after_call = self._is_after_call and not text
        return [text] if text else []

    def _certain(self, text: str) -> str:
        for length in range(min(len(self._start) - 1, len(text)), 0, -1):
            if text.endswith(self._start[:length]):
                text = text[:-length]
                break
        return text.rstrip()


class LeadingCalls:
    """Calls that are all of an output: JSON objects, one after another, perhaps behind a mark."""

    _MARK = "<|python_tag|>"

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._held: str | None = ""
        """The output so far while it may be calls; None if it is text."""

    def push(self, text: str) -> list[Found]:
        """Returns what is certain with more text."""
        if self._held is None:
            return [text]
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith(("{", self._MARK)) or self._MARK.startswith(begun):
            return []
        held, self._held = self._held, None
        return [held]

    def finish(self) -> list[Found]:
        """Returns the rest at the end of the output."""
        held, self._held = self._held, None
        if not held:
            return []
        try:
            return list(_objects_in(held.strip().removeprefix(self._MARK), self._functions))
        except _NO_CALL:
            return [held]


def _objects_in(text: str, functions: Functions) -> list[tuple[str, str]]:
    calls, place = [], 0
    while place < len(text):
        value, place = _DECODER.raw_decode(text, place + len(text[place:]) - len(text[place:].lstrip("; \n\t")))
        calls.append(_call(value, functions))
        place += len(text[place:]) - len(text[place:].lstrip("; \n\t"))
    if not calls:
        raise ValueError("no call")
    return calls


def _call(value: Any, functions: Functions) -> tuple[str, str]:
    """Reads an object with a name and arguments. Raises ValueError for another one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in functions:
        raise ValueError("no call of a function that there is")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _hermes(text: str, functions: Functions) -> list[tuple[str, str]]:
    try:
        return [_call(json.loads(text), functions)]
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise UnfinishedError from error
        raise


def _mistral(text: str, functions: Functions) -> list[tuple[str, str]]:
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)", part)
        if named:
            value, end = _DECODER.raw_decode(part, named.end())
            values: Any = [{"name": named[1], "arguments": value}]
        else:
            stripped = part.lstrip()
            values, end = _DECODER.raw_decode(stripped)
            part = stripped
            values = values if isinstance(values, list) else [values]
        if part[end:].strip():
            raise ValueError("text follows the calls")
        calls += [_call(value, functions) for value in values]
    if not calls:
        raise ValueError("no call")
    return calls


def _qwen3_coder(text: str, functions: Functions) -> list[tuple[str, str]]:
    calls = []
    for name, body in re.findall(r"<function=([^>\s]+)>(.*?)</function>", text, re.DOTALL):
        if name not in functions:
            raise ValueError("no call of a function that there is")
        properties = functions[name].get("parameters", {}).get("properties", {})
        given = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        arguments = {key: _typed(value, properties.get(key, {})) for key, value in given}
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    if not calls:
        raise ValueError("no call")
    return calls


def _typed(value: str, schema: Any) -> Any:
    """A value in the type of its schema; the text itself where it has none, or is none of that type."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in (None, "string"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)


CALL_FORMS: dict[str, Callable[[Functions], MarkedCalls | LeadingCalls]] = {
    "hermes": lambda functions: MarkedCalls(functions, "<tool_call>", "</tool_call>", _hermes),
    "qwen3_coder": lambda functions: MarkedCalls(functions, "<tool_call>", "</tool_call>", _qwen3_coder),
    "mistral": lambda functions: MarkedCalls(functions, "[TOOL_CALLS]", None, _mistral),
    "llama3_json": LeadingCalls,
}
"""Makes a reader of calls for the functions that may be called, by the form's name."""
