"""The corpus of constraints: schemas, regular expressions and grammars, each with a check of outputs of its own."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema.validators import validator_for
from llguidance import LLTokenizer

from slipstream.bundled import target_dir
from slipstream.common.grammars import load_grammar_tokenizer
from slipstream.gateway.grammar_compiler import GrammarSource

EOS_ID = 0
"""The bundled model's."""

FOLDER = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Case:
    """A constraint, by the field of a request and its value."""

    name: str
    field: str
    value: Any
    check: Callable[[str], None]
    """Raises for an output that does not keep to it."""

    @property
    def grammar(self) -> str:
        """The serialised grammar, for the bundled model's tokenizer."""
        value = json.dumps(self.value) if self.field == "json_schema" else self.value
        answer = GrammarSource(bundled_tokenizer()).answer({"field": self.field, "value": value, "special_tokens": {}})
        assert "grammar" in answer, (self.name, answer)
        return answer["grammar"]


@cache
def bundled_tokenizer() -> LLTokenizer:
    """The bundled model's, for grammars."""
    vocab_size = json.loads((target_dir() / "config.json").read_text())["vocab_size"]
    return load_grammar_tokenizer(target_dir(), vocab_size, [EOS_ID])


def cases() -> list[Case]:
    """Returns all of the corpus."""
    schemas = [json.loads(line) for line in (FOLDER / "schemas.jsonl").read_text(encoding="utf-8").splitlines()]
    regexes = json.loads((FOLDER / "regexes.json").read_text(encoding="utf-8"))
    grammars = json.loads((FOLDER / "grammars.json").read_text(encoding="utf-8"))
    return [
        *(Case(f"{one['kind']}: {one['name']}", "json_schema", one["schema"], _by(one["schema"])) for one in schemas),
        *(Case(f"regex: {regex}", "regex", regex, _matching(regex)) for regex in regexes),
        *(
            Case(
                f"grammar: {one['name']}",
                "grammar",
                one["grammar"],
                _CHECKS.get(one["check"]) or _matching(one["check"]),
            )
            for one in grammars
        ),
    ]


def _by(schema: Any) -> Callable[[str], None]:
    kind = validator_for(schema)
    kind.check_schema(schema)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    return lambda text: validator.validate(json.loads(text))


def _matching(regex: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(regex, text), f"{text!r} does not match {regex}"

    return check


def _check_json(text: str) -> None:
    json.loads(text)


def _check_python(text: str) -> None:
    ast.parse(text, mode="eval")


def _check_balanced(text: str) -> None:
    while text:
        shorter = text.replace("()", "").replace("[]", "")
        assert shorter != text
        text = shorter


_CHECKS: dict[str, Callable[[str], None]] = {
    "json": _check_json,
    "python": _check_python,
    "balanced": _check_balanced,
}
