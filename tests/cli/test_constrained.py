"""Constrained outputs of a running `up`: our client, the command line, and the `openai` package through the door."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from slipstream.client import Client
from slipstream.common.wire.job import FinishReason, OutputChunk
from tests.harness.running import slipstream

pytestmark = [pytest.mark.timeout(120), pytest.mark.sampled_module(3)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["list", "dict"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "make", "parameters": SCHEMA, "strict": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "class Queue:"}]
PROMPT = "class Queue:\n    "


@pytest.fixture
def client(chat_server: str) -> Iterator[Client]:
    with Client(chat_server) as connected:
        yield connected


@pytest.fixture
def theirs(openai_url: str) -> Iterator[openai.OpenAI]:
    """The `openai` package's client of the door."""
    with openai.OpenAI(base_url=openai_url, api_key="none", max_retries=0) as connected:
        yield connected


def outputs(chunks: list[OutputChunk]) -> list[tuple[str, list[int]]]:
    """Text and tokens of each sample."""
    found: dict[int, tuple[str, list[int]]] = {}
    for chunk in chunks:
        text, tokens = found.get(chunk.sample_index, ("", []))
        found[chunk.sample_index] = text + chunk.text, [*tokens, *chunk.token_ids]
    return [found[index] for index in sorted(found)]


def test_samples_keep_to_a_schema_with_drafts_and_without(client: Client) -> None:
    request: dict[str, Any] = {"json_schema": SCHEMA, "temperature": 0.6, "seed": 4, "n": 3, "max_new_tokens": 200}
    chunks = list(client.generate(PROMPT, **request, logprobs=True, top_logprobs=1))
    drafted = outputs(chunks)
    for text, _ in drafted:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert outputs(list(client.generate(PROMPT, **request, speculation=False))) == drafted
    # The model's own probabilities, of which a constraint knows nothing.
    assert sum(len(chunk.logprobs) for chunk in chunks) == sum(len(tokens) for _, tokens in drafted)
    assert any(one.logprob < one.top[0][1] for chunk in chunks for one in chunk.logprobs)


def test_a_stop_string_ends_an_output_in_the_midst_of_its_constraint(client: Client) -> None:
    chunks = list(client.generate(PROMPT, regex="[a-z]{4}#[0-9]{4}", stop="#", max_new_tokens=40))
    ((text, _),) = outputs(chunks)
    assert re.fullmatch("[a-z]{4}", text)
    end = next(chunk for chunk in chunks if chunk.finish_reason is not None)
    assert (end.finish_reason, end.matched_stop) == (FinishReason.STOP, "#")


def test_an_output_that_has_no_room_is_cut(client: Client) -> None:
    chunks = list(client.generate(PROMPT, regex="[0-9]{60}", max_new_tokens=5))
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.LENGTH]
    assert re.fullmatch("[0-9]+", outputs(chunks)[0][0])


def test_the_command_line_has_constraints(chat_server: str, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.gbnf"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('root ::= "[" [0-9] ("," [0-9]){0,3} "]"')
    options = ("generate", "--server", chat_server, "--max-new-tokens", "200")
    for more, pattern in (
        (("--json-schema", str(schema)), r'\{[^}]*"kind"[^}]*\}\n'),
        (("--regex", "[xyz]{3}"), "[xyz]{3}\n"),
        (("--grammar", str(grammar)), r"\[\d(,\d){0,3}\]\n"),
        (("--choice", "one", "--choice", "two"), "(one|two)\n"),
    ):
        found = slipstream(*options, *more, PROMPT)
        assert found.returncode == 0, found.stderr
        assert re.fullmatch(pattern, found.stdout), (more, found.stdout)
    for more, message in (
        (("--regex", "(a"), "--regex: "),
        (("--choice", "a", "--choice", ""), "--choice: got ''"),
        (("--regex", "a", "--choice", "b"), "--choice: got ['b'], accepted: none beside regex"),
        (("--regex", "a", "--ignore-eos"), "--ignore-eos: got True, accepted: false with a constraint"),
    ):
        found = slipstream(*options, *more, PROMPT)
        assert (found.returncode, message in found.stderr) == (2, True), found.stderr


def test_openai_s_client_gets_json(theirs: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}},
        "max_completion_tokens": 200,
        "temperature": 0.5,
        "seed": 6,
        "n": 2,
    }
    whole = theirs.chat.completions.create(**request)
    for choice in whole.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        assert choice.finish_reason == "stop"
    streamed = ["", ""]
    for event in theirs.chat.completions.create(**request, stream=True):
        for part in event.choices:
            streamed[part.index] += part.delta.content or ""
    assert streamed == [choice.message.content for choice in whole.choices]
    completion = theirs.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=20,
        echo=True,
        n=2,
        extra_body={"guided_choice": ["pass", "return None"]},
    )
    assert {choice.text.removeprefix(PROMPT) for choice in completion.choices} <= {"pass", "return None"}
    bad = request | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        theirs.chat.completions.create(**bad)
    assert (caught.value.param, caught.value.type) == ("response_format", "invalid_request_error")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "make"}}, "auto"])
def test_openai_s_client_gets_calls(theirs: openai.OpenAI, choice: Any) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_completion_tokens": 60 if choice == "auto" else 200,
        "temperature": 0.5,
        "seed": 2,
    }
    whole = theirs.chat.completions.create(**request).choices[0]
    calls = whole.message.tool_calls or []
    if choice != "auto":
        assert (len(calls), whole.finish_reason) == (1, "tool_calls")
    for call in calls if whole.finish_reason == "tool_calls" else ():
        assert call.type == "function"
        assert call.function.name == "make"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    streamed = ""
    for event in theirs.chat.completions.create(**request, stream=True):
        for part in event.choices[0].delta.tool_calls or () if event.choices else ():
            streamed += (part.function and part.function.arguments) or ""
    assert streamed == "".join(call.function.arguments for call in calls if call.type == "function")
