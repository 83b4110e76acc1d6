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
    from collections.abc import Callable, Mapping, Sequence

_TEXT = "/(?s:.*)/"
_MAX_FORMATS = 1024
"""Formats in a tag: each becomes a rule."""
_FIELDS = {
    "const_string": {"value"},
    "any_text": set(),
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
    "grammar": {"grammar"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags"},
    "tags_with_separator": {"tags", "separator"},
}
_FLAGS = {"at_least_one", "stop_after_first"}


def format_of(given: Any) -> dict[str, Any]:
    """Returns the format of a structural tag in either form. Raises ValueError."""
    if not isinstance(given, dict):
        raise ValueError("got no JSON object")
    if given.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type: got {given['type']!r}, accepted: structural_tag")
    keys = given.keys() - {"type"}
    if keys == {"format"}:
        return _object(given["format"], "format")
    if keys != {"structures", "triggers"}:
        raise ValueError(f"got the fields {', '.join(sorted(keys))}, accepted: format, or structures and triggers")
    tags = [
        {"begin": one.get("begin"), "content": {"type": "json_schema", "json_schema": one.get("schema")}, **_end(one)}
        for one in map(_object, _list(given["structures"], "structures"))
        if _only(one, {"begin", "schema", "end"}, "structures")
    ]
    return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}


def _end(structure: Mapping[str, Any]) -> dict[str, Any]:
    return {"end": structure.get("end", "")}


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
        self._names = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
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
        if len(self._rules) >= _MAX_FORMATS:
            raise ValueError(f"it has more than {_MAX_FORMATS} parts")
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _expression(self, given: Any, path: str, *, is_last: bool = False) -> str:
        """The rule of a format; `is_last`: nothing follows it."""
        one = _object(given, path)
        kind = one.get("type")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise ValueError(f"{path}.type: got {kind!r}, accepted: {', '.join(_FIELDS)}")
        flags = _FLAGS if kind in ("triggered_tags", "tags_with_separator") else set()
        _only(one, _FIELDS[kind] | flags | {"type"}, path)
        for name in flags & one.keys():
            if not isinstance(one[name], bool):
                raise ValueError(f"{path}.{name}: got {one[name]!r}, accepted: true, false")
        match kind:
            case "const_string":
                return self._rule(self._text(one.get("value"), f"{path}.value") or '""')
            case "any_text":
                if not is_last:
                    raise ValueError(f"{path}: any_text is accepted at the end, and in a tag with an end")
                return self._rule(_TEXT)
            case "json_schema":
                return self._rule(f"%json {self._schema_of(one.get('json_schema'))}")
            case "regex":
                return self._rule(f"/{regex_to_lark(_string(one.get('pattern'), f'{path}.pattern'), '')}/")
            case "grammar":
                name = f"grammar_{len(self._others)}"
                lark = self._lark_of(_string(one.get("grammar"), f"{path}.grammar"))
                self._others.append({"name": name, "lark_grammar": lark})
                return self._rule(f"@{name}")
            case "tag":
                return self._tag(one, path, is_last=is_last)
            case "triggered_tags":
                return self._triggered(one, path, is_last=is_last)
            case "tags_with_separator":
                return self._separated(one, path, is_last=is_last)
        elements = _list(one.get("elements"), f"{path}.elements")
        ends = [is_last and (kind == "or" or index == len(elements) - 1) for index in range(len(elements))]
        rules = [
            self._expression(element, f"{path}.elements[{index}]", is_last=ends[index])
            for index, element in enumerate(elements)
        ]
        return self._rule((" | " if kind == "or" else " ").join(rules))

    def _tag(self, tag: Any, path: str, *, without: str = "", is_last: bool = False) -> str:
        """The rule of a tag, whose beginning `without` is there already."""
        one = _object(tag, path)
        _only(one, _FIELDS["tag"] | {"type"}, path)
        begin = self._text(_string(one.get("begin"), f"{path}.begin").removeprefix(without), f"{path}.begin")
        end, content = _string(one.get("end"), f"{path}.end"), one.get("content")
        if isinstance(content, dict) and content == {"type": "any_text"} and end:
            return self._rule(f"{begin} {self._text_to(end)}")
        inner = self._expression(content, f"{path}.content", is_last=is_last and not end)
        return self._rule(f"{begin} {inner} {self._text(end, f'{path}.end')}")

    def _triggered(self, one: dict[str, Any], path: str, *, is_last: bool) -> str:
        if not is_last:
            raise ValueError(f"{path}: triggered_tags are accepted at the end")
        triggers = [_string(trigger, f"{path}.triggers") for trigger in _list(one.get("triggers"), f"{path}.triggers")]
        rest: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(_list(one.get("tags"), f"{path}.tags")):
            field = f"{path}.tags[{index}]"
            begin = _string(_object(tag, field).get("begin"), f"{field}.begin")
            trigger = max(
                (trigger for trigger in triggers if trigger and begin.startswith(trigger)), key=len, default=""
            )
            if not trigger:
                raise ValueError(f"{field}.begin: got {begin!r}, accepted: a text that begins with one of triggers")
            rest[trigger].append(self._tag(tag, field, without=trigger))
        tags = self._rule(
            " | ".join(f"{self._text_to(trigger)} ({' | '.join(tags)})" for trigger, tags in rest.items() if tags)
        )
        is_first, is_needed = one.get("stop_after_first", False), one.get("at_least_one", False)
        if is_first:
            return tags if is_needed else self._rule(f"{tags} | {self._rule(_TEXT)}")
        return self._rule(f"{tags}{'+' if is_needed else '*'} {self._rule(_TEXT)}")

    def _separated(self, one: dict[str, Any], path: str, *, is_last: bool) -> str:
        is_first = one.get("stop_after_first", False)
        tags = self._rule(
            " | ".join(
                self._tag(tag, f"{path}.tags[{index}]", is_last=is_last and is_first)
                for index, tag in enumerate(_list(one.get("tags"), f"{path}.tags"))
            )
        )
        separator = self._text(one.get("separator"), f"{path}.separator")
        more = tags if is_first else f"{tags} ({separator} {tags})*"
        return self._rule(more if one.get("at_least_one", False) else f"({more})?")

    def _text(self, value: Any, path: str) -> str:
        """The text of a mark as literals and special tokens."""
        pieces = self._names.split(_string(value, path)) if self._names else [_string(value, path)]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def _text_to(self, mark: str) -> str:
        """Any text up to the first `mark`, and that."""
        literals = self._text(mark, "mark")
        if literals.startswith("<["):
            return f"{self._rule(_TEXT)} {literals}"
        first, *others = re.findall(r'"(?:[^"\\]|\\.)*"|<\[\d+\]>', literals)
        return " ".join([self._rule(f"{_TEXT} {first}", "[lazy]"), *others])


def _object(value: Any, path: str = "structures") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got {value!r}, accepted: an object")
    return value


def _list(value: Any, path: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{path}: got {value!r}, accepted: a list of at least one")
    return value


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path}: got {value!r}, accepted: a text")
    return value


def _only(given: Mapping[str, Any], accepted: set[str], path: str) -> bool:
    for name in sorted(given.keys() - accepted):
        raise ValueError(f"{path}.{name}: there is no such field, or it is not supported")
    return True
