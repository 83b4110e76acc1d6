"""Calls of tools and thoughts, through the whole gateway, as the `openai` package reads them; and /v1/responses.

The fake scheduler repeats the prompt, which is the last message's text: so it is the output, too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any

import openai
import pytest

from slipstream.door.fields import parse
from slipstream.door.responses import ResponsesRequest
from tests.door.test_parsers import COMMENTARY, HERMES, LLAMA, MISTRAL, WEATHER
from tests.harness.doors import RunningDoor, running_door
from tests.harness.generation_server import generation_server

FORMS = {
    "hermes": ("<tool_call>", f"<think>Hm.</think>Sure. {HERMES}"),
    "mistral": ("[TOOL_CALLS]", f"<think>Hm.</think>Sure. {MISTRAL}"),
    "llama3_json": ("ipython", f"<think>Hm.</think>{LLAMA}"),
    "harmony": ("<|channel|>", f"<|channel|>analysis<|message|>Hm.<|end|>{COMMENTARY}"),
}
FUNCTION = {"type": "function", **WEATHER["function"]}
SCHEMA = {"format": {"type": "json_schema", "name": "a", "schema": {}}}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "add"}}]


@asynccontextmanager
async def door_of(form: str) -> AsyncIterator[tuple[RunningDoor, int, str]]:
    """A door, the tokens of an output, and the output."""
    mark, text = FORMS[form]
    async with generation_server() as server, running_door(server.address) as door:
        tokenizer = server.model.tokenizer
        before = tokenizer.chat_template
        tokenizer.chat_template = f"{{# tools {mark} </think> #}}{{{{ messages[-1].content }}}}"
        server.model.formats = (form, "harmony" if form == "harmony" else "think")
        try:
            yield door, len(tokenizer.encode(text, add_special_tokens=False)), text
        finally:
            tokenizer.chat_template = before


@pytest.mark.parametrize("form", FORMS)
async def test_a_call_is_found_with_a_stream_and_without(form: str) -> None:
    async with door_of(form) as (door, num_tokens, text):
        request: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"{text}</s>"}],
            "tools": TOOLS,
            "max_completion_tokens": num_tokens + 1,
        }
        whole = (await door.openai.chat.completions.create(**request)).choices[0]
        calls = whole.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls[:1]] == [
            ("get_weather", {"city": "Paris"})
        ]
        assert whole.message.reasoning_content == "Hm."
        assert whole.message.content == ("Sure." if "Sure" in text else None)
        assert whole.finish_reason == "tool_calls"
        async with door.openai.chat.completions.stream(**request) as stream:
            events = [event async for event in stream]
        deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        assert len([event for event in deltas if event.index == 0 and event.arguments_delta]) > 1
        final = (await stream.get_final_completion()).choices[0].message
        streamed = final.tool_calls or []
        assert [(one.function.name, one.function.arguments) for one in streamed] == [
            (one.function.name, one.function.arguments) for one in calls
        ]
        assert (final.content or None) == whole.message.content
        again = [*request["messages"], final.model_dump(), {"role": "user", "content": "ok"}]
        last = await door.openai.chat.completions.create(**request | {"messages": again, "max_completion_tokens": 1})
        assert last.choices[0].message.content in "ok"


async def test_the_end_of_a_call_says_so_and_one_call_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with door_of("mistral") as (door, num_tokens, text):
        request: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"{text}</s>"}],
            "tools": TOOLS,
            "max_completion_tokens": num_tokens + 1,
        }
        whole = (await door.openai.chat.completions.create(**request)).choices[0]
        assert (whole.finish_reason, len(whole.message.tool_calls or ())) == ("tool_calls", 2)
        alone = (await door.openai.chat.completions.create(**request, parallel_tool_calls=False)).choices[0]
        assert (alone.finish_reason, len(alone.message.tool_calls or ())) == ("tool_calls", 1)
        without = (await door.openai.chat.completions.create(**request, tool_choice="none")).choices[0]
        assert (without.finish_reason, without.message.tool_calls) == ("stop", None)
        assert without.message.content == f"Sure. {MISTRAL}"


@pytest.mark.parametrize("form", ["hermes", "harmony"])
async def test_a_response_has_items_and_its_events_make_them(form: str) -> None:
    async with door_of(form) as (door, num_tokens, text):
        request: dict[str, Any] = {
            "model": "tiny",
            "input": text,
            "tools": [FUNCTION],
            "max_output_tokens": num_tokens,
            "store": False,
            "reasoning": None,
        }
        whole = await door.openai.responses.create(**request)
        kinds = ["reasoning", *(["message"] if "Sure" in text else []), "function_call"]
        assert [item.type for item in whole.output] == kinds
        call: Any = whole.output[-1]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        assert whole.status == "incomplete"
        assert whole.usage is not None
        assert whole.usage.output_tokens == num_tokens
        num_thoughts = await num_tokens_of_thoughts(door, text)
        assert whole.usage.output_tokens_details.reasoning_tokens == num_thoughts
        events = [event async for event in await door.openai.responses.create(**request, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [events[0].type, events[1].type, events[-1].type] == [
            *("response.created", "response.in_progress", "response.incomplete"),
        ]
        final: Any = events[-1]
        dropped = {"id", "call_id"}
        assert [item.model_dump(exclude=dropped) for item in final.response.output] == [
            item.model_dump(exclude=dropped) for item in whole.output
        ]
        texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert texts == ("Sure." if "Sure" in text else "")
        assert "".join(
            event.delta for event in events if event.type == "response.function_call_arguments.delta"
        ) == json.dumps({"city": "Paris"})


async def num_tokens_of_thoughts(door: RunningDoor, text: str) -> int:
    """Those from that which ends the mark before thoughts to that which ends the mark after them."""
    found = (await door.post("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)).json()
    before, after = ("<|message|>", "<|end|>") if "<|channel|>" in text else ("<think>", "</think>")
    ends = list(accumulate(len(token) for token in found["token_strs"]))
    begin, end = text.index(before) + len(before), text.index(after) + len(after)
    assert ends[-1] == len(text)
    return sum(place >= begin for place in ends) - sum(place >= end for place in ends) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_of_a_conversation_are_counted_by_tokens(stream: bool) -> None:
    async with door_of("hermes") as (door, num_tokens, text):
        request: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": num_tokens,
            "n": 2,
        }
        if stream:
            answer = await door.post(
                "/v1/chat/completions", **request, stream=True, stream_options={"include_usage": True}
            )
            usage = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["usage"]
        else:
            usage = (await door.post("/v1/chat/completions", **request)).json()["usage"]
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert counted == 2 * await num_tokens_of_thoughts(door, text)


async def test_a_response_has_logprobs_of_its_text() -> None:
    async with door_of("hermes") as (door, _, _):
        request: dict[str, Any] = {
            "model": "tiny",
            "input": "<think>Hm.</think>Sure.</s>",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        whole = await door.openai.responses.create(**request)
        (part,) = whole.output[-1].content
        tokens = [one.token for one in part.logprobs]
        # The end of the output has a token, too.
        assert "".join(tokens[:-1]).endswith(part.text)
        assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
        assert len(tokens) < whole.usage.output_tokens
        events: list[Any] = [event async for event in await door.openai.responses.create(**request, stream=True)]
        streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        assert [one.token for one in streamed] == tokens[: len(streamed)]
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert [one.token for one in done.logprobs] == tokens
        plain = await door.openai.responses.create(model="tiny", input="Sure.</s>")
        assert plain.output[-1].content[0].logprobs == []  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("output", "kind", "status"),
    [
        ("Sure", "message", "incomplete"),
        (HERMES.removesuffix("\n</tool_call>"), "function_call", "completed"),
        (HERMES.removesuffix('"}}\n</tool_call>'), "function_call", "incomplete"),
    ],
)
async def test_an_item_that_is_cut_says_so(output: str, kind: str, status: str) -> None:
    async with door_of("hermes") as (door, _, _):
        num_tokens = (await door.post("/tokenize", prompt=output, add_special_tokens=False)).json()["count"]
        fields = {"input": output, "tools": [FUNCTION], "max_output_tokens": num_tokens}
        answer = (await door.post("/v1/responses", **fields)).json()
        (item,) = answer["output"]
        assert (answer["status"], item["type"], item["status"]) == ("incomplete", kind, status)


async def test_a_response_goes_on_with_its_items() -> None:
    async with door_of("hermes") as (door, num_tokens, text):
        first = await door.openai.responses.create(
            model="tiny",
            input=text,
            tools=[FUNCTION],
            max_output_tokens=num_tokens,
        )
        call: Any = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
        items: Any = [{"role": "user", "content": text}, *(item.model_dump() for item in first.output), result]
        tools: Any = [FUNCTION]
        answer = await door.openai.responses.create(
            model="tiny", input=items, instructions="Be brief.", tools=tools, max_output_tokens=4
        )
        assert answer.output_text == "warm"[: len(answer.output_text)]
        assert answer.output_text


def test_no_thoughts_of_an_input_are_left_out() -> None:
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": one}]} for one in "abc"
    ]
    said = {"role": "assistant", "content": "Sure."}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [{"role": "user", "content": "?"}, *thoughts[:2], said, thoughts[2], call]
    _, answer = parse(json.dumps({"input": items}).encode(), ResponsesRequest).messages()
    assert (answer["reasoning"], answer["content"], len(answer["tool_calls"])) == ("a\nb\nc", "Sure.", 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "a"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**FUNCTION, "strict": True}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": SCHEMA, "tools": [FUNCTION], "tool_choice": "required"}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
    ],
    ids=str,
)
async def test_a_field_of_a_response_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    async with door_of("hermes") as (door, _, _):
        answer = await door.post("/v1/responses", **{"input": "a"} | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_tools_of_no_known_form_are_refused() -> None:
    async with generation_server() as server, running_door(server.address, tool_call_parser="none") as door:
        with pytest.raises(openai.BadRequestError) as caught:
            await door.openai.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "a"}],
                tools=TOOLS,  # type: ignore[arg-type]
            )
        assert caught.value.param == "tools"
