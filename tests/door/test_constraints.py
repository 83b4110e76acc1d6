"""What the fields of OpenAI's requests make of outputs: the grammar that reaches the scheduler, through both servers.

The scheduler is a scripted one without masks.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import validate
from llguidance import LLTokenizer

from slipstream.common.grammars import load_grammar_tokenizer, new_matcher
from slipstream.door.parsers import Arguments, Forms, make_parser
from tests.harness.doors import RunningDoor, running_door
from tests.harness.example_states import STATE, VOCAB_SIZE
from tests.harness.generation_server import generation_server
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler
from tests.harness.tokenizers_by_kind import make_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
PLACE, ARGUMENTS = '{"city": "Paris"}', '{"city": "Rome"}'


class Served:
    """A door, its gateway, and what reaches the scheduler."""

    def __init__(self, door: RunningDoor, submitted: Any, path: Path) -> None:
        self.door = door
        self.submitted = submitted
        """The sequences."""
        self._tokenizer: LLTokenizer = load_grammar_tokenizer(path, VOCAB_SIZE, [1])

    async def grammar(self, path: str, **fields: Any) -> str:
        """The grammar of a request's sequences."""
        answer = await self.door.post(path, max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        return str(self.submitted[-1].spec.grammar)

    async def chat(self, **fields: Any) -> Callable[[str], bool]:
        """Tells whether an output is one that the grammar of a conversation accepts."""
        grammar = await self.grammar("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **fields)
        return lambda text: self.accepts(grammar, text)

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether a text is a whole output."""
        matcher, tokens = new_matcher(self._tokenizer, grammar), self._tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@asynccontextmanager
async def serving(path: Path, tools: str = "", reasoning: str = "") -> AsyncIterator[Served]:
    """A door before a gateway whose model has these forms of calls and thoughts."""
    tokenizer = make_tokenizer("byte level")
    tokenizer.save_pretrained(path)
    scheduler = ScriptedScheduler(replace(DESCRIPTION, server=STATE, tokenizer_path=str(path), constraints=True))
    async with (
        generation_server(scheduler=scheduler, tokenizer_path=str(path)) as server,
        running_door(server.address) as door,
    ):
        before, tokenizer.chat_template = (
            tokenizer.chat_template,
            "{# tools enable_thinking #}{{ messages[-1].content }}",
        )
        server.model.formats = tools, reasoning
        try:
            yield Served(door, scheduler.submitted, path)
        finally:
            tokenizer.chat_template = before


WAYS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": BY_SCHEMA}, [PLACE], ["{}", "Paris"]),
    ({"response_format": {"type": "json_object"}}, ["{}", PLACE], ["[]", "Paris"]),
    ({"guided_json": SCHEMA}, [PLACE], ["{}"]),
    ({"guided_json": json.dumps(SCHEMA)}, [PLACE], ["{}"]),
    ({"guided_regex": "a+"}, ["aa"], ["ab"]),
    ({"guided_choice": ["yes", "no"]}, ["yes"], ["ye"]),
    ({"guided_grammar": 'root ::= "x" | "y"'}, ["x"], ["xy"]),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, [PLACE], ["{}"]),
    ({"structured_outputs": {"json": None, "json_object": False, "regex": "a"}}, ["a"], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"structured_outputs": {"regex": "a+"}}, ["aa"], ["ab"]),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ["no"], ["ye"]),
    ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, ["y"], ["xy"]),
]
"""Fields, outputs that keep to them, and outputs that do not."""
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]}


async def test_each_way_to_say_it_is_a_grammar(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for fields, accepted, refused in WAYS:
            accepts = await served.chat(**fields, n=2)
            completion = await served.grammar("/v1/completions", prompt="Hello", **fields)
            for text, is_whole in [*((text, True) for text in accepted), *((text, False) for text in refused)]:
                assert accepts(text) == served.accepts(completion, text) == is_whole, (fields, text)
        for fields in (
            {"response_format": {"type": "structural_tag", **TAG}},
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        ):
            accepts = await served.chat(**fields)
            assert (accepts("a <f>1</f> b"), accepts("a <f>b</f>")) == (True, False)
        assert await served.grammar("/v1/completions", prompt="Hello", response_format={"type": "text"}) == ""


async def test_responses_have_a_format_of_their_text(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        given = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
        client, submitted = served.door.openai, served.submitted
        answer = await client.responses.create(model="tiny", input="Hello", max_output_tokens=1, text={"format": given})
        assert served.accepts(submitted[-1].spec.grammar, PLACE)
        assert not served.accepts(submitted[-1].spec.grammar, "{}")
        assert answer.text.format.type == "json_schema"
        await client.responses.create(
            model="tiny", input="Hello", max_output_tokens=1, text={"format": {"type": "json_object"}}
        )
        assert served.accepts(submitted[-1].spec.grammar, "{}")
        bad = given | {"schema": {"not": {}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input="Hello", text={"format": bad})
        assert (caught.value.param, "not: the keyword" in caught.value.message) == ("text.format", True)


CALLS = {
    "hermes": ('<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>', "\n"),
    "llama3_json": ('{"name": "get_weather", "parameters": %s}', "; "),
    "mistral": ('[TOOL_CALLS] [{"name": "get_weather", "arguments": %s}]', None),
    "harmony": ("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>%s", None),
    "qwen3_coder": ("<tool_call>\n<function=get_weather>\n%s</function>\n</tool_call>", "\n"),
}
"""A call of each form, and what is between two."""


def call_of(tools: str, arguments: str) -> str:
    """A call of `get_weather`."""
    if tools == "qwen3_coder":
        values = json.loads(arguments).items()
        arguments = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
    return CALLS[tools][0] % arguments


THOUGHTS = {
    "": "",
    "think": "<think>Hm {</think>\n\n",
    "think_open": "Hm {</think>\n\n",
    "harmony": "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tools", CALLS)
async def test_a_call_can_be_asked_for(tmp_path: Path, tools: str) -> None:
    reasoning = "harmony" if tools == "harmony" else ""
    before = THOUGHTS[reasoning]
    between = CALLS[tools][1]
    good, bad = call_of(tools, ARGUMENTS), call_of(tools, '{"town": "Rome"}')
    async with serving(tmp_path, tools, reasoning) as served:
        named: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("required", named):
            accepts = await served.chat(tools=[WEATHER, CLOCK], tool_choice=choice)
            assert (accepts(before + good), accepts(before + bad), accepts("Sure.")) == (True, False, False)
            assert accepts(call_of(tools, "{}").replace("get_weather", "clock")) == (choice == "required")
            if between:
                assert accepts(good + between + good) == (choice == "required")
        one = await served.chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        assert (one(good), between and one(good + between + good)) == (True, between and False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tools", CALLS)
async def test_a_strict_tool_is_called_with_arguments_of_its_schema_or_not_at_all(tmp_path: Path, tools: str) -> None:
    reasoning = "harmony" if tools == "harmony" else ""
    text = "<|channel|>final<|message|>Sure {}." if tools == "harmony" else "Sure {}."
    good, bad = call_of(tools, ARGUMENTS), call_of(tools, '{"town": "Rome"}')
    async with serving(tmp_path, tools, reasoning) as served:
        for choice in ({}, {"tool_choice": "auto"}):
            accepts = await served.chat(tools=[WEATHER, CLOCK], **choice)
            assert (accepts(good), accepts(bad), accepts(text)) == (True, False, True)
            # A function that is not strict gets any object.
            assert accepts(call_of(tools, '{"zone": 1}').replace("get_weather", "clock"))
        if tools != "llama3_json":
            either = await served.chat(tools=[CLOCK], response_format=BY_SCHEMA)
            said = text.replace("Sure {}.", PLACE)
            assert (either(said), either(text)) == (True, False)
            assert either(call_of(tools, '{"zone": 1}').replace("get_weather", "clock"))
        messages = [{"role": "user", "content": "Hello"}]
        for fields in ({"tools": [CLOCK]}, {"tools": [WEATHER], "tool_choice": "none"}):
            assert await served.grammar("/v1/chat/completions", messages=messages, **fields) == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reasoning", THOUGHTS)
async def test_thoughts_are_before_what_keeps_to_a_schema(tmp_path: Path, reasoning: str) -> None:
    before, said = THOUGHTS[reasoning], f"<|channel|>final<|message|>{PLACE}" if reasoning == "harmony" else PLACE
    async with serving(tmp_path, "hermes", reasoning) as served:
        accepts = await served.chat(response_format=BY_SCHEMA)
        assert accepts(before + said)
        assert accepts(said) == (reasoning != "think_open")
        assert not accepts(before)
        assert not accepts(f"{before}Paris")
        if reasoning.startswith("think"):
            off = await served.chat(response_format=BY_SCHEMA, chat_template_kwargs={"enable_thinking": False})
            assert (off(PLACE), off(before + PLACE)) == (True, False)
            choice = await served.chat(structured_outputs={"choice": ["a", "b"]})
            assert (choice(f"{before}a"), choice(f"{before}c")) == (True, False)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format",
        "not: the",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object with a schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "accepted: text, json_object"),
    ({"guided_json": {"unevaluatedItems": True}}, "guided_json", "unevaluatedItems"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "at least one character"),
    ({"guided_choice": []}, "guided_choice", "at least one text"),
    ({"guided_grammar": "a"}, "guided_grammar", "::="),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-ahead"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "json_object"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "none beside guided_json"),
    ({"guided_regex": "a", "response_format": BY_SCHEMA}, "response_format", "none beside guided_regex"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "0 with a constraint"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "false with a constraint"),
    ({"tool_choice": "required"}, "tool_choice", "auto, none without tools"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "a function by its name"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "one of tools",
    ),
    (
        {"tools": [WEATHER], "tool_choice": "required", "response_format": BY_SCHEMA},
        "response_format",
        "asks for a call",
    ),
]


async def test_what_cannot_be_honoured_is_refused_in_openai_s_form(tmp_path: Path) -> None:
    async with serving(tmp_path, "hermes") as served:
        for fields, param, reason in REFUSED:
            answer = await served.door.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **fields
            )
            error = answer.json()["error"]
            found = answer.status_code, error["type"], error["param"], reason in error["message"]
            assert found == (400, "invalid_request_error", param, True), (fields, error)
        bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"minContains": 1}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await served.door.openai.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "a"}],
                tools=[bad],  # type: ignore[list-item]
            )
        assert (caught.value.param, "minContains: the keyword" in caught.value.message) == ("tools", True)


TYPED: dict[str, Any] = {
    "text": {"type": "string", "description": "Any."},
    "unit": {"type": "string", "enum": ["C", "F"]},
    "count": {"type": "integer", "$ref": "#/$defs/count"},
    "place": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}, "required": ["x"]},
    "kind": {"$ref": "#/$defs/kind"},
    "name": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "more": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "boolean"}]},
}


def typed_tool(properties: Any = TYPED, **more: Any) -> dict[str, Any]:
    """A strict function `f`."""
    schema = {"type": "object", "properties": properties, "required": ["text", "count"], **more}
    schema["$defs"] = {
        "count": {"type": "integer", "minimum": 3},
        "kind": {"type": "string", "title": "Kind", "enum": ["a", "b"]},
    }
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}


def typed_call(**values: str) -> str:
    """A call of it."""
    inner = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


async def test_arguments_that_are_no_json_keep_to_their_schema(tmp_path: Path) -> None:
    values = {
        "text": "if a < b:\n\tc</parameter",
        "unit": "F",
        "count": "12",
        "place": '{"x": 1.5}',
        "kind": "b",
        "name": '"12"',
        "more": "true",
    }
    async with serving(tmp_path, "qwen3_coder") as served:
        accepts = await served.chat(tools=[typed_tool()], tool_choice="required")
        for left_out in ([], ["unit"], ["unit", "place", "name"]):
            call = typed_call(**{name: value for name, value in values.items() if name not in left_out})
            assert accepts(call), left_out
            validate(json.loads(arguments_of(call)), typed_tool()["function"]["parameters"])
        for name in ("text", "count"):
            assert not accepts(typed_call(**{other: value for other, value in values.items() if other != name}))
        wrong = {
            "text": "a</parameter>b",
            "unit": "K",
            "count": "2",
            "place": "{}",
            "kind": "c",
            "name": "12",
            "more": "2",
        }
        for name, value in wrong.items():
            assert not accepts(typed_call(**{**values, name: value})), name


def arguments_of(call: str) -> str:
    """The arguments that a client gets."""
    parser = make_parser(Forms("qwen3_coder", ""), [typed_tool()], {})
    assert parser is not None
    return "".join(part.text for part in [*parser.push(call), *parser.finish()] if isinstance(part, Arguments))


async def test_parameters_that_are_no_json_and_cannot_be_constrained_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path, "qwen3_coder") as served:
        for tool, param in (
            (typed_tool({"a": {"type": "string", "pattern": "b"}}), "tools.parameters.properties.a.pattern"),
            (typed_tool({"a": {"enum": [1, "b"]}}), "tools.parameters.properties.a"),
            (typed_tool({"a": {"anyOf": [{"type": "string"}]}}), "tools.parameters.properties.a.anyOf"),
            (typed_tool({"a": 1}), "tools.parameters.properties.a"),
            (typed_tool([]), "tools.parameters.properties"),
            (typed_tool(minProperties=1), "tools.parameters.minProperties"),
            (typed_tool({"a": {"type": 5}}), "tools.parameters.properties.a.type"),
            (typed_tool({"a": {"type": None}}), "tools.parameters.properties.a.type"),
            (typed_tool({"a b": {"type": "string"}}), "tools.parameters.properties.a b"),
            (typed_tool({"": {"type": "string"}}), "tools.parameters.properties."),
            (typed_tool(required=None), "tools.parameters.required"),
            (typed_tool(required=[{}]), "tools.parameters.required"),
        ):
            answer = await served.door.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=[tool]
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.json()
        many = typed_tool({f"a{number}": {"type": "integer"} for number in range(2 * 10**4)})
        answer = await served.door.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=[many]
        )
        assert "a copy for each parameter" in answer.json()["error"]["message"], answer.json()


async def test_a_schema_is_refused_where_it_cannot_be_told_from_a_call(tmp_path: Path) -> None:
    async with serving(tmp_path, "llama3_json") as served:
        messages = [{"role": "user", "content": "a"}]
        request: dict[str, Any] = {"messages": messages, "tools": [CLOCK], "response_format": BY_SCHEMA}
        error = (await served.door.post("/v1/chat/completions", **request)).json()["error"]
        assert (error["param"], "unless tool_choice is none" in error["message"]) == ("response_format", True)
        assert await served.grammar("/v1/chat/completions", **request, tool_choice="none")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_langchain_asks_for_structured_output(tmp_path: Path) -> None:
    from langchain_openai import ChatOpenAI

    async with serving(tmp_path, "hermes") as served:
        model = ChatOpenAI(model="tiny", base_url=f"{served.door.url}/v1", api_key="none", max_retries=0)
        schema = {"title": "place", "description": "A place.", **SCHEMA}
        for method, accepted in (
            ("json_schema", PLACE),
            ("json_mode", "{}"),
            ("function_calling", f'<tool_call>\n{{"name": "place", "arguments": {PLACE}}}\n</tool_call>'),
        ):
            # Without masks, the output keeps to nothing.
            asked = model.with_structured_output(schema, method=method, include_raw=True)  # type: ignore[arg-type]
            await asked.ainvoke("Hello</s>")
            assert served.accepts(served.submitted[-1].spec.grammar, accepted)
            assert not served.accepts(served.submitted[-1].spec.grammar, "Hello")
