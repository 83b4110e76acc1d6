"""The process that compiles constraints of outputs into llguidance's grammars, within bounds of time and memory.

A JSON schema with a keyword that the library does not know is refused, as the library would ignore it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from slipstream.common.errors import CheckpointError
from slipstream.common.grammars import (
    MAX_COMPILE_STACK_BYTES,
    check_begin,
    load_grammar_tokenizer,
    new_matcher,
    one_line,
)
from slipstream.gateway.bounded_process import answer_all_in_forks, bound_memory
from slipstream.gateway.structural_tags import TagGrammar

if TYPE_CHECKING:
    from collections.abc import Callable

COMPILE_S = 1.0
"""Processor time that a constraint may take, in seconds."""
MAX_MEMORY_BYTES = 2**31
"""Address space of the process."""

_SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OTHERS = frozenset(
    {
        *("$ref", "const", "enum", "type", "required", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minLength", "maxLength", "pattern", "format"),
        # Those that say nothing about what is accepted.
        *("$anchor", "$comment", "$id", "$schema", "default", "deprecated", "description", "discriminator"),
        *("example", "examples", "id", "readOnly", "title", "writeOnly"),
    }
)
KEYWORDS = _SCHEMAS | _LISTS | _BY_NAME | _NUMBERS | _OTHERS
"""The keywords of JSON schema that are supported, and those that are annotations."""
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)
"""Values of `format` that are supported."""
_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    # A model may go on with white space without end.
    "whitespace_pattern": r" |\n[ \t]{0,64}",
}


def check_schema(schema: Any, path: str = "") -> None:
    """Raises ValueError naming a keyword that is not supported."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{path or 'it'}: got {one_line(repr(schema))[:80]}, accepted: a schema: an object")
    for keyword, value in schema.items():
        where = f"{path}.{keyword}".removeprefix(".")
        if keyword not in KEYWORDS:
            raise ValueError(f"{where}: the keyword is not supported")
        if keyword in _NUMBERS and isinstance(value, bool):
            raise ValueError(f"{where}: got {value}, accepted: a number")
        if keyword == "format" and value not in FORMATS:
            raise ValueError(f"{where}: got {one_line(repr(value))[:80]}, accepted: {', '.join(sorted(FORMATS))}")
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            for index, item in enumerate(value if isinstance(value, list) else ()):
                check_schema(item, f"{where}[{index}]")
        elif keyword in _SCHEMAS:
            check_schema(value, where)
        elif keyword in _BY_NAME and isinstance(value, dict):
            for name, item in value.items():
                check_schema(item, f"{where}.{name}")


def grammar_of_schema(text: str) -> str:
    """Returns the serialised grammar of a JSON schema. Raises ValueError."""
    schema = json.loads(text)
    check_schema(schema)
    if schema is True:
        text = "{}"
    elif schema is False:
        raise ValueError("no output can keep to it: the schema is false")
    return LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)


def lark_of(grammar: str) -> str:
    """Returns a grammar in Lark, whose JSON schemas have supported keywords only. Raises ValueError."""
    lark: str = any_to_lark(grammar)
    for found in re.finditer(r"%json\s*(?=\{)", lark):
        schema, _ = json.JSONDecoder().raw_decode(lark, found.end())
        check_schema(schema)
    return lark


def grammar_of_choice(texts: list[str]) -> str:
    """Returns the serialised grammar of one of some texts."""
    return LLMatcher.grammar_from_regex("|".join(re.sub(r"[][(){}.*+?^$|\\/#&~-]", r"\\\g<0>", text) for text in texts))


class GrammarSource:
    """Turns constraints into grammars that were compiled for a tokenizer."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def answer(self, request: dict[str, Any]) -> dict[str, str]:
        """Returns the grammar of a constraint, or the error in its place.

        `request`: its field, its value, and the numbers of special tokens by name.
        """
        try:
            grammar = _grammar_of(**request)
            check_begin(new_matcher(self._tokenizer, grammar), self._tokenizer)
        except (KeyboardInterrupt, SystemExit):
            raise
        except RecursionError:
            return {"error": "it is nested too deeply"}
        except MemoryError:
            return {"error": f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"}
        except BaseException as error:  # a panic of the library is no Exception
            return {"error": one_line(str(error)) or type(error).__name__}
        return {"grammar": grammar}


def _grammar_of(field: str, value: Any, special_tokens: dict[str, int]) -> str:
    match field:
        case "json_schema":
            return grammar_of_schema(value)
        case "json_object":
            return grammar_of_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "grammar":
            return LLMatcher.grammar_from_lark(lark_of(value))
        case "choice":
            return grammar_of_choice(value)
    return TagGrammar(special_tokens, _schema_in_lark, lark_of).build(json.loads(value))


def _schema_in_lark(schema: Any) -> str:
    grammars = json.loads(grammar_of_schema(schema if isinstance(schema, str) else json.dumps(schema)))
    return json.dumps(grammars["grammars"][0]["json_schema"])


def main(path: str, numbers: str) -> None:
    """Answers requests for the tokenizer of a model's directory. `numbers`: a JSON object, see `GrammarCompiler`."""
    bound_memory(MAX_MEMORY_BYTES, MAX_COMPILE_STACK_BYTES)
    given = json.loads(numbers)
    answer: Callable[[dict[str, Any]], dict[str, str]]
    try:
        tokenizer = load_grammar_tokenizer(Path(path), given["vocab_size"], given["eos_token_ids"])
        answer = GrammarSource(tokenizer).answer
    except CheckpointError as error:
        reason = {"error": str(error)}
        answer = lambda _: reason  # noqa: E731
    answer_all_in_forks(answer, processor_seconds=COMPILE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
