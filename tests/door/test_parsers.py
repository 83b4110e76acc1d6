"""Calls and thoughts found in outputs, in any parts that the text comes in; what is no call stays text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.door.parsers import Forms, Reasoning, make_parser
from slipstream.door.tools import Arguments, Call, Content
from tests.harness.chat_templates import TOOL
from tests.harness.sampling import examples

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "is_hot": {"type": "boolean"},
                "tags": {"type": "array"},
            },
        },
    },
}
TOOLS = [TOOL, WEATHER]
PARIS = '{"city": "Paris"}'
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
MARKED = '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call> é \\" <tool_call>"}}</tool_call>'
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n 2</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=is_hot>\nTrue\n</parameter>\n<parameter=tags>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
)
CODER_ARGUMENTS = {"city": "Paris\n 2", "days": 3, "is_hot": True, "tags": [1, 2]}
SWAPPED = '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'
AS_TEXT = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
ESCAPED = '<tool_call>{"name": "get_weather", "arguments": {"city": "\\\\\\"}</tool_call>"}}</tool_call>'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
MISTRAL = (
    '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "add", "arguments": {"a": 1}}]'
)
MARKS = "</parameter> </function> </tool_call> <tool_call> [TOOL_CALLS] <|python_tag|> <|call|> <|end|>[{<|message|>"
"""The marks of all forms of calls, as a value may hold them."""
ANALYSIS = "<|channel|>analysis<|message|>Let me think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is warm."
COMMENTARY = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + PARIS
BEFORE = "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>" + PARIS

W, A = ("get_weather", json.loads(PARIS)), ("add", {"a": 1})
M, C = ("get_weather", {"city": MARKS}), ("get_weather", CODER_ARGUMENTS)
CODER_MARKS = ("get_weather", CODER_ARGUMENTS | {"tags": ["1", MARKS]})
CODER_TEXT = ("get_weather", CODER_ARGUMENTS | {"city": '["a </function>\n</tool_call>'})
CASES: list[tuple[str, str, str, tuple[str, str, list[Any]]]] = [
    ("hermes", "", HERMES, ("", "", [W])),
    ("hermes", "", f"Sure.\n{HERMES}\n{ADD}\n", ("Sure.", "", [W, A])),
    ("hermes", "", f"{HERMES} and then", ("and then", "", [W])),
    ("hermes", "", HERMES.removesuffix("\n</tool_call>"), ("", "", [W])),
    ("hermes", "", MARKED, ("", "", [("get_weather", {"city": '</tool_call> é " <tool_call>'})])),
    ("hermes", "", "A <tool_call> is a tag.", ("A <tool_call> is a tag.", "", [])),
    ("hermes", "", "<tool_call>{}</tool_call> x", ("<tool_call>{}</tool_call> x", "", [])),
    ("hermes", "", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', (..., "", [])),  # type: ignore[list-item]
    ("hermes", "", '<tool_call>{"name": "add", "arguments": 1}</tool_call>', (..., "", [])),  # type: ignore[list-item]
    ("hermes", "", "a < b <tool", ("a < b <tool", "", [])),
    ("hermes", "", "plain  text \n", ("plain  text \n", "", [])),
    ("qwen3_coder", "", CODER, ("", "", [("get_weather", CODER_ARGUMENTS)])),
    ("qwen3_coder", "", f"Ok.\n\n{CODER}", ("Ok.", "", [("get_weather", CODER_ARGUMENTS)])),
    ("qwen3_coder", "", "<tool_call>\n<function=rm>\n</function>\n</tool_call>", (..., "", [])),  # type: ignore[list-item]
    ("qwen3_coder", "", CODER.replace("[1, 2]", json.dumps(["1", MARKS])) + CODER, ("", "", [CODER_MARKS, C])),
    ("qwen3_coder", "", CODER.replace("Paris\n 2", CODER_TEXT[1]["city"]), ("", "", [CODER_TEXT])),
    ("qwen3_coder", "", CODER.removesuffix("\n</tool_call>"), ("", "", [C])),
    ("qwen3_coder", "", CODER.replace("[1, 2]\n</parameter>", "["), (..., "", [])),  # type: ignore[list-item]
    ("qwen3_coder", "", f"Use <tool_call> for {CODER}", ("Use <tool_call> for", "", [C])),
    ("llama3_json", "", LLAMA, ("", "", [W])),
    ("llama3_json", "", LLAMA.replace("Paris", MARKS), ("", "", [M])),
    ("llama3_json", "", f"{AS_TEXT[11:-12]}; {LLAMA}".replace("Paris", MARKS), ("", "", [M, M])),
    ("llama3_json", "", f'{{"a": "{MARKS}"}} x', (..., "", [])),  # type: ignore[list-item]
    ("llama3_json", "", f"<|python_tag|>{LLAMA}; {LLAMA}", ("", "", [W, W])),
    ("llama3_json", "", f"Hi {LLAMA}", (f"Hi {LLAMA}", "", [])),
    ("llama3_json", "", '{"a": 1}', ('{"a": 1}', "", [])),
    ("llama3_json", "", LLAMA + " done", ("done", "", [W])),
    ("llama3_json", "", f"Hi <|python_tag|>{LLAMA}", ("Hi", "", [W])),
    ("hermes", "", HERMES.removesuffix(' "Paris"}}\n</tool_call>'), ("", "", [("get_weather", '{"city":')])),
    ("hermes", "", SWAPPED, ("", "", [W])),
    ("hermes", "", f"{SWAPPED}\n{AS_TEXT}\n{HERMES} x".replace("Paris", MARKS), ("x", "", [M, M, M])),
    ("hermes", "", HERMES.replace("}}", f"}}}}\n{LLAMA}"), ("", "", [W, W])),
    ("hermes", "", f"A <tool_call> is a tag: {HERMES}", ("A <tool_call> is a tag:", "", [W])),
    ("hermes", "", SWAPPED.replace("Paris", "\\ud83d"), (..., "", [])),  # type: ignore[list-item]
    ("hermes", "", SWAPPED.replace('"Paris"', "NaN"), (..., "", [])),  # type: ignore[list-item]
    ("hermes", "", AS_TEXT + " x", ("x", "", [W])),
    ("hermes", "", ESCAPED, ("", "", [("get_weather", {"city": '\\"}</tool_call>'})])),
    ("hermes", "", HERMES.removesuffix("\n</tool_call>") + " after", ("after", "", [W])),
    ("mistral", "", MISTRAL + " after", ("after", "", [W, A])),
    ("mistral", "", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', ("", "", [A, A])),
    ("mistral", "", MISTRAL, ("", "", [W, A])),
    ("mistral", "", f'[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add{{"a": 1}}', ("", "", [W, A])),
    ("mistral", "", f"{MISTRAL} x".replace("Paris", MARKS), ("x", "", [M, A])),
    ("mistral", "", f"[TOOL_CALLS][{SWAPPED[11:-12]}, {LLAMA}] x".replace("Paris", MARKS), ("x", "", [M, M])),
    ("mistral", "", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}".replace("Paris", MARKS), ("", "", [M])),
    ("mistral", "", f"A [TOOL_CALLS] is a tag: {MISTRAL}", ("A [TOOL_CALLS] is a tag:", "", [W, A])),
    ("mistral", "", "[TOOL_CALLS] no", ("[TOOL_CALLS] no", "", [])),
    ("", "think", "<think>\nWhy?\n</think>\n\nSo.", ("So.", "Why?", [])),
    ("", "think", "No thoughts.", ("No thoughts.", "", [])),
    ("", "think", "<think>cut", ("", "cut", [])),
    ("", "think_open", "Why?\n</think>\n\nSo.", ("So.", "Why?", [])),
    ("", "think_open", "Why? </thin", ("", "Why? </thin", [])),
    ("hermes", "think", f"<think>Is {ADD}?</think>\n\n{HERMES}", ("", f"Is {ADD}?", [W])),
    ("harmony", "harmony", ANALYSIS + FINAL, ("It is warm.", "Let me think.", [])),
    ("harmony", "harmony", ANALYSIS + FINAL + "<|return|>", ("It is warm.", "Let me think.", [])),
    ("harmony", "harmony", ANALYSIS + COMMENTARY, ("", "Let me think.", [W])),
    ("harmony", "harmony", ANALYSIS + BEFORE + "<|call|>", ("", "Let me think.", [W])),
    ("harmony", "harmony", COMMENTARY.replace("get_weather", "rm"), (PARIS, "", [])),
    ("harmony", "harmony", (COMMENTARY + "<|call|>" + FINAL).replace("Paris", MARKS), ("It is warm.", "", [M])),
    ("harmony", "harmony", "No channel.", ("No channel.", "", [])),
    ("harmony", "harmony", "a <", ("a <", "", [])),
]


@pytest.mark.parametrize("parameters", [None, True, {"properties": ["city"]}, {"properties": {"city": None}}])
def test_a_call_of_a_function_without_schemas_is_read(parameters: Any) -> None:
    tool = {"function": {"name": "get_weather", "parameters": parameters}}
    parser = make_parser(Forms("qwen3_coder", ""), [tool], {})
    assert parser is not None
    call, arguments = [*parser.push(CODER), *parser.finish()]
    assert isinstance(call, Call)
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text)["city"] == CODER_ARGUMENTS["city"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"12"', "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12),
        ({"type": ["boolean", "string"]}, "True", True),
        ({"$ref": "#/$defs/place"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/nothing"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/loop"}]}, "1", "1"),
        ({"type": {}, "anyOf": 3}, "1", "1"),
        ({"type": 5}, "1", "1"),
        ({"type": None}, "1", "1"),
        ({"$ref": "#/$defs/wide"}, "1", 1),
    ],
)
def test_a_parameter_has_a_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    definitions: dict[str, Any] = {"place": {"type": "object"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    # Each of which is the whole again: the time is bounded all the same.
    definitions["wide"] = {"anyOf": [{"type": "integer"}, *1000 * [{"$ref": "#/$defs/wide"}]]}
    parameters = {"properties": {"a": schema}, "$defs": definitions}
    parser = make_parser(Forms("qwen3_coder", ""), [{"function": {"name": "f", "parameters": parameters}}], {})
    assert parser is not None
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    found = [part.text for part in [*parser.push(call), *parser.finish()] if isinstance(part, Arguments)]
    assert json.loads("".join(found)) == {"a": value}


def read(forms: Forms, parts: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """What is said, thought and called in a text that comes in parts."""
    parser = make_parser(forms, TOOLS if forms.tools else [], {})
    assert parser is not None
    deltas = [delta for part in parts for delta in parser.push(part)]
    deltas += parser.finish()
    said = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, Call):
            calls.append([delta.name, ""])
        elif isinstance(delta, Arguments):
            calls[-1][1] += delta.text
    return said, thought, [(name, json_or_text(arguments)) for name, arguments in calls]


def json_or_text(text: str) -> Any:
    """The value of a text; the text itself if it was cut."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize(("tools", "reasoning", "text", "expected"), CASES, ids=[repr(case[2])[:60] for case in CASES])
def test_an_output_has_the_same_parts_however_it_comes(
    tools: str, reasoning: str, text: str, expected: tuple[str, str, list[Any]]
) -> None:
    forms = Forms(tools, reasoning)
    said = text if expected[0] is ... else expected[0]

    @settings(max_examples=examples(30), deadline=None)
    @given(st.lists(st.integers(0, len(text))))
    def check(cuts: list[int]) -> None:
        places = [0, *sorted(cuts), len(text)]
        found = read(forms, [text[a:b] for a, b in pairwise(places)])
        assert (found[0], *found[1:]) == (said, *expected[1:])

    check()
    for between in ([], [""]):
        assert read(forms, [part for sign in text for part in (sign, *between)]) == (said, *expected[1:])


@settings(max_examples=examples(200), deadline=None)
@given(
    st.text(alphabet="<tol_ca>{}[]\"' \n/TOL|é:name", max_size=60),
    st.sampled_from(["hermes", "mistral", "llama3_json"]),
)
def test_text_that_is_no_call_stays_text(text: str, form: str) -> None:
    found, _, calls = read(Forms(form, ""), list(text))
    assert calls == []
    assert found == text


def test_thoughts_may_be_turned_off() -> None:
    parser = make_parser(Forms("", "think_open"), [], {"enable_thinking": False})
    assert parser is not None
    assert [*parser.push("So."), *parser.finish()] == [Content("So.")]


def test_ids_have_the_form_that_templates_take() -> None:
    parser = make_parser(Forms("mistral", ""), TOOLS, {})
    assert parser is not None
    ids = [one.id for one in [*parser.push(MISTRAL), *parser.finish()] if isinstance(one, Call)]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
