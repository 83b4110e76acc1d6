"""Structural tags as grammars: text with parts that keep to a schema, between given marks.

The forms are vLLM's `{"structures": ..., "triggers": ...}` and XGrammar's `{"type": "structural_tag", "format": ...}`.
A name of a special token in a mark is that token, which never matches text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llguidance import regex_to_lark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TEXT = "/(?s:.*)/"
_MAX_RULES = 1024
"""Rules of a tag's grammar: one for each of its parts."""
_FIELDS: dict[str, dict[str, type]] = {
    "const_string": {"value": str},
    "any_text": {},
    "json_schema": {"json_schema": object},
    "regex": {"pattern": str},
    "grammar": {"grammar": str},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "tag": {"begin": str, "content": dict, "end": str},
    "triggered_tags": {"triggers": list, "tags": list},
    "tags_with_separator": {"tags": list, "separator": str},
}
"""The fields of each format, and their types."""
_FLAGS = ("at_least_one", "stop_after_first")
"""Fields of the last two that may be there, too."""
_TYPES = {str: "a text", list: "a list of at least one", dict: "an object", bool: "true, false", object: "a value"}


def format_of(given: Any) -> dict[str, Any]:
    """Returns the format of a structural tag in either form. Raises ValueError."""
    tag = {name: value for name, value in _typed(given, dict, "it").items() if name != "type"}
    if given.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type: got {given['type']!r}, accepted: structural_tag")
    if tag.keys() == {"format"}:
        return dict(_typed(tag["format"], dict, "format"))
    if tag.keys() != {"structures", "triggers"}:
        raise ValueError(f"got the fields {', '.join(sorted(tag))}, accepted: format, or structures and triggers")
    tags = []
    for index, one in enumerate(_typed(tag["structures"], list, "structures")):
        named = {"end": ""} | _typed(one, dict, f"structures[{index}]")
        schema = {"type": "json_schema", "json_schema": named.pop("schema", None)}
        tags.append({**named, "content": schema})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class TagGrammar:
    """Builds the grammars of a structural tag."""

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        schema_of: Callable[[Any], str],
        lark_of: Callable[[str], str],
    ) -> None:
        """`schema_of` turns a JSON schema into the text of a checked one, `lark_of` a grammar into Lark."""
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._names = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else re.compile(r"(?!)")
        self._schema_of = schema_of
        self._lark_of = lark_of
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []

    def build(self, structural_tag: Any) -> str:
        """Returns the serialised grammars. Raises ValueError naming the part that cannot be honoured."""
        start = self._expression(format_of(structural_tag), "format", is_last=True)
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._others]})

    def _rule(self, body: str, options: str = "") -> str:
        if len(self._rules) >= _MAX_RULES:
            raise ValueError(f"it has more than {_MAX_RULES} parts")
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _expression(self, given: Any, path: str, *, is_last: bool = False) -> str:
        """The rule of a format; `is_last`: nothing follows it."""
        one = _checked(given, path)
        match one["type"]:
            case "any_text" | "triggered_tags" if not is_last:
                raise ValueError(f"{path}: {one['type']} is accepted at the end, or as the text of a tag with an end")
            case "const_string":
                return self._rule(self._text(one["value"]) or '""')
            case "any_text":
                return self._rule(_TEXT)
            case "json_schema":
                return self._rule(f"%json {self._schema_of(one['json_schema'])}")
            case "regex":
                return self._rule(f"/{regex_to_lark(one['pattern'], '')}/")
            case "grammar":
                name = f"grammar_{len(self._others)}"
                self._others.append({"name": name, "lark_grammar": self._lark_of(one["grammar"])})
                return self._rule(f"@{name}")
            case "tag":
                return self._tag(one, path, is_last=is_last)
            case "triggered_tags":
                return self._triggered(one, path)
            case "tags_with_separator":
                return self._separated(one, path, is_last=is_last)
        is_choice, most = one["type"] == "or", len(one["elements"]) - 1
        rules = [
            self._expression(element, f"{path}.elements[{index}]", is_last=is_last and (is_choice or index == most))
            for index, element in enumerate(one["elements"])
        ]
        return self._rule((" | " if is_choice else " ").join(rules))

    def _tag(self, given: Any, path: str, *, without: str = "", is_last: bool = False) -> str:
        """The rule of a tag, whose beginning `without` is there already."""
        one = _checked(given, path, "tag")
        begin, end = self._text(one["begin"].removeprefix(without)), one["end"]
        if one["content"] == {"type": "any_text"} and end:
            return self._rule(f"{begin} {self._text_to(end)}")
        inner = self._expression(one["content"], f"{path}.content", is_last=is_last and not end)
        return self._rule(f"{begin} {inner} {self._text(end)}")

    def _triggered(self, one: dict[str, Any], path: str) -> str:
        rest: dict[str, list[str]] = {_typed(trigger, str, f"{path}.triggers"): [] for trigger in one["triggers"]}
        for index, tag in enumerate(one["tags"]):
            field = f"{path}.tags[{index}]"
            begin = _checked(tag, field, "tag")["begin"]
            trigger = max((one for one in rest if one and begin.startswith(one)), key=len, default="")
            if not trigger:
                raise ValueError(f"{field}.begin: got {begin!r}, accepted: a text that begins with one of triggers")
            rest[trigger].append(self._tag(tag, field, without=trigger))
        marked = (f"{self._text_to(trigger)} ({' | '.join(tags)})" for trigger, tags in rest.items() if tags)
        tags, text = self._rule(" | ".join(marked)), self._rule(_TEXT)
        if one["stop_after_first"]:
            return tags if one["at_least_one"] else self._rule(f"{tags} | {text}")
        return self._rule(f"{tags}{'+' if one['at_least_one'] else '*'} {text}")

    def _separated(self, one: dict[str, Any], path: str, *, is_last: bool) -> str:
        is_last = is_last and one["stop_after_first"]
        each = (self._tag(tag, f"{path}.tags[{index}]", is_last=is_last) for index, tag in enumerate(one["tags"]))
        tags = self._rule(" | ".join(each))
        more = tags if one["stop_after_first"] else f"{tags} ({self._text(one['separator'])} {tags})*"
        return self._rule(more if one["at_least_one"] else f"({more})?")

    def _pieces(self, mark: str) -> list[str]:
        """The literals and special tokens of a mark."""
        return [
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in self._names.split(mark)
            if piece
        ]

    def _text(self, mark: str) -> str:
        return " ".join(self._pieces(mark))

    def _text_to(self, mark: str) -> str:
        """Any text up to the first `mark`, and that."""
        first, *others = self._pieces(mark)
        if first.startswith("<"):
            return " ".join([self._rule(_TEXT), first, *others])
        return " ".join([self._rule(f"{_TEXT} {first}", "[lazy]"), *others])


def _checked(given: Any, path: str, *kinds: str) -> dict[str, Any]:
    """A format, of one of some kinds, with all of its fields. Raises ValueError."""
    one = {"type": "tag"} | _typed(given, dict, path) if kinds == ("tag",) else _typed(given, dict, path)
    kind = one.get("type")
    if not isinstance(kind, str) or kind not in (kinds or _FIELDS):
        raise ValueError(f"{path}.type: got {kind!r}, accepted: {', '.join(kinds or _FIELDS)}")
    flags = dict.fromkeys(_FLAGS, bool) if kind in ("triggered_tags", "tags_with_separator") else {}
    for name in one.keys() - {"type", *_FIELDS[kind], *flags}:
        raise ValueError(f"{path}.{name}: there is no such field, or it is not supported")
    one = dict.fromkeys(flags, False) | one
    return {"type": kind} | {
        name: _typed(one.get(name), expected, f"{path}.{name}") for name, expected in (_FIELDS[kind] | flags).items()
    }


def _typed(value: Any, expected: type, path: str) -> Any:
    if not isinstance(value, expected) or value == []:
        raise ValueError(f"{path}: got {value!r}, accepted: {_TYPES[expected]}")
    return value
