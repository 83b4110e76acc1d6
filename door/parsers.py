"""Finds in an output what is thought, said and called, while the text arrives.

The forms are those of chat templates. Text that has the form of no call stays text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.door.tools import CALL_FORMS, Arguments, Call, CallParser, Content, ObjectEnd, held_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TOOL_FORMS = (*CALL_FORMS, "harmony")
REASONING_FORMS = ("think", "think_open", "harmony")
_SPECIAL_MARKS = ("llama3_json", "mistral", "harmony")
"""Forms whose marks are special tokens."""


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of a model; empty: it has none."""

    tools: str
    reasoning: str

    def needs_special_tokens(self, *, has_tools: bool) -> bool:
        """True if special tokens must have their names in the text."""
        return self.reasoning == "harmony" or (has_tools and self.tools in _SPECIAL_MARKS)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that it thinks."""

    text: str


Delta: TypeAlias = "Content | Reasoning | Call | Arguments"
Parser: TypeAlias = "CallParser | ThinkParser | HarmonyParser"
"""Reads the output of a sample."""


def make_parser(forms: Forms, tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> Parser | None:
    """Makes the parser of an output with these tools; None if all of it is content.

    `kwargs`: variables of the template, which may turn thoughts off.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if "harmony" in (forms.reasoning, forms.tools if tools else ""):
        return HarmonyParser(functions)
    inner: CallParser | None = None
    if functions:
        inner = CallParser(CALL_FORMS[forms.tools], functions)
    if not forms.reasoning:
        return inner
    return ThinkParser(inner, is_open=forms.reasoning == "think_open" and thinks(kwargs))


def thinks(kwargs: Mapping[str, Any]) -> bool:
    """False if the template's variables turn thoughts off."""
    return not any(kwargs.get(name) is False for name in ("enable_thinking", "thinking"))


class ThinkParser:
    """Finds thoughts between <think> and </think>; the rest is content, or for another parser."""

    def __init__(self, inner: CallParser | None, *, is_open: bool) -> None:
        """`is_open`: the output begins in the midst of thoughts."""
        self._inner = inner
        self._held = ""
        self._state = "thoughts" if is_open else "start"
        self._has_text = False
        """False until white space at the beginning of this part is over."""

    @property
    def is_thinking(self) -> bool:
        """True within thoughts."""
        return self._state == "thoughts"

    def push(self, text: str) -> list[Delta]:
        """Returns what is certain with more text."""
        if self._state == "content":
            return self._content(text)
        self._held += text
        if self._state == "start":
            begun = self._held.lstrip()
            if "<think>".startswith(begun[:7]) and len(begun) < 7:
                return []
            if not begun.startswith("<think>"):
                self._state, self._has_text, held, self._held = "content", True, self._held, ""
                return self._content(held)
            self._state, self._held = "thoughts", begun[7:]
        thought, mark, rest = self._held.partition("</think>")
        if mark:
            self._state, self._held = "content", ""
            found = self._thought(thought.rstrip())
            self._has_text = False
            return [*found, *self._content(rest)]
        certain = held_back(thought, "</think>").rstrip()
        self._held = thought[len(certain) :]
        return self._thought(certain)

    def finish(self) -> list[Delta]:
        """Returns the rest at the end of the output."""
        held, self._held = self._held, ""
        found = self._thought(held.rstrip()) if self._state == "thoughts" else self._content(held)
        return [*found, *(self._inner.finish() if self._inner is not None else ())]

    def _thought(self, text: str) -> list[Delta]:
        text = self._begun(text)
        return [Reasoning(text)] if text else []

    def _content(self, text: str) -> list[Delta]:
        text = self._begun(text)
        if not text:
            return []
        return [Content(text)] if self._inner is None else [*self._inner.push(text)]

    def _begun(self, text: str) -> str:
        text = text if self._has_text else text.lstrip()
        self._has_text = self._has_text or bool(text)
        return text


class HarmonyParser:
    """Reads the channels of harmony: analysis is thought, what a function is to get is a call, the rest is said."""

    _MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")

    def __init__(self, functions: Mapping[str, Any]) -> None:
        """`functions`: by name, those that may be called."""
        self._functions = functions
        self._held = ""
        self._header: str | None = ""
        """The header that is being read; None in a message."""
        self._channel, self._recipient = "final", ""
        self._has_arguments = False
        self._arguments = ObjectEnd()
        """Says whether a mark is within a string of a call's arguments."""

    @property
    def is_thinking(self) -> bool:
        """True within thoughts."""
        return self._header is None and self._channel == "analysis"

    def push(self, text: str) -> list[Delta]:
        """Returns what is certain with more text."""
        pieces = re.split(f"({'|'.join(map(re.escape, self._MARKS))})", self._held + text)
        last = pieces[-1]
        certain = min((held_back(last, mark) for mark in self._MARKS), key=len)
        self._held = last[len(certain) :]
        return [delta for piece in (*pieces[:-1], certain) if piece for delta in self._read(piece)]

    def finish(self) -> list[Delta]:
        """Returns the rest at the end of the output."""
        held, self._held = self._held, ""
        found = self._read(held) if held else []
        if self._header is None:
            return [*found, *self._end()]
        # An output without any channel is what it says.
        return [Content(self._header)] if self._header and not self._header.startswith("\0") else []

    def _read(self, piece: str) -> list[Delta]:
        is_text = self._arguments.is_in_string or piece not in self._MARKS or piece == "<|constrain|>"
        if piece == "<|message|>" and not is_text:
            return self._begin()
        if not is_text:
            ended = self._end() if self._header is None else []
            # What is before the channel, as the recipient may be, is kept.
            self._header = f"{self._header or ''}\0{piece}" if piece == "<|channel|>" else "\0"
            return ended
        if self._header is not None:
            self._header += piece
            return []
        if self._recipient in self._functions:
            self._has_arguments = True
            self._arguments.find(piece)
            return [Arguments(piece)]
        return [Reasoning(piece) if self._channel == "analysis" else Content(piece)]

    def _begin(self) -> list[Delta]:
        header = self._header or ""
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"to=functions\.([\w.-]+)", header)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else ""
        self._header, self._has_arguments, self._arguments = None, False, ObjectEnd()
        return [Call.of(self._recipient)] if self._recipient in self._functions else []

    def _end(self) -> list[Delta]:
        self._header = "\0"
        return [Arguments("{}")] if self._recipient in self._functions and not self._has_arguments else []
