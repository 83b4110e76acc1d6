"""Fields: those that work, and those that are refused by their name, in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from slipstream.client import AsyncClient
from slipstream.common.errors import ResourceExhaustedError, UnavailableError
from slipstream.door.fields import ChatRequest, CompletionRequest, StreamOptions
from slipstream.door.responses import ResponsesRequest
from tests.harness.chat_templates import PLAIN, TOOL
from tests.harness.doors import RunningDoor, running_door
from tests.harness.generation_server import GenerationServer, collect, generation_server, text_of
from tests.harness.grpc_server import unserved_address

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[GenerationServer]:
    """A gateway whose model has a template."""
    async with generation_server() as running:
        before = running.model.tokenizer.chat_template
        running.model.tokenizer.chat_template = TEMPLATE
        yield running
        running.model.tokenizer.chat_template = before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(server: GenerationServer) -> AsyncIterator[RunningDoor]:
    """A door before it."""
    async with running_door(server.address) as running:
        yield running


COMPLETION: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5}
CHAT: dict[str, Any] = {"messages": PLAIN, "max_completion_tokens": 5}
TOOLS = {"tools": [TOOL]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "a"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"n": 17}, "n"),
        ({"n": 2**31}, "n"),
        ({"stop": ["a", "x" * 300]}, "stop[1]"),
        ({"stop_token_ids": [99_999]}, "stop_token_ids[0]"),
        ({"logit_bias": {"1": 200}}, "logit_bias[1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"guided_json": {}}, "guided_json"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [[5], []]}, "prompt"),
        ({"prompt": [5] * 5000}, "prompt"),
        ({"prompt": [99_999]}, "prompt[0]"),
        ({"max_draft_tokens": 100}, "max_draft_tokens"),
    ],
    ids=str,
)
async def test_a_completion_s_field_is_refused_by_its_name(
    door: RunningDoor, server: GenerationServer, fields: dict[str, Any], param: str
) -> None:
    num_before = len(server.loop.submitted)
    answer = await door.post("/v1/completions", **COMPLETION | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert error["message"].startswith(param.partition("[")[0])
    assert len(server.loop.submitted) == num_before


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"n": 2**31}, "n"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        (TOOLS, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].function"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prediction": {}}, "prediction"),
    ],
    ids=str,
)
async def test_a_conversation_s_field_is_refused_by_its_name(
    door: RunningDoor, server: GenerationServer, fields: dict[str, Any], param: str
) -> None:
    num_before = len(server.loop.submitted)
    answer = await door.post("/v1/chat/completions", **CHAT | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert len(server.loop.submitted) == num_before


NULLS = dict.fromkeys(
    (
        *(
            "model",
            "stream",
            "stream_options",
            "temperature",
            "top_p",
            "n",
            "stop",
            "frequency_penalty",
            "user",
            "seed",
        ),
        *("user", "presence_penalty", "logit_bias", "metadata", "service_tier", "response_format", "logprobs"),
    )
)


async def test_null_is_absent_and_what_has_no_effect_is_taken(door: RunningDoor) -> None:
    plain = {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "response_format": {"type": "text"}}
    for path, fields, more in (
        ("/v1/completions", COMPLETION, {"best_of": None, "suffix": None, "echo": None}),
        ("/v1/chat/completions", CHAT, {"tools": None, "tool_choice": "auto", "parallel_tool_calls": True}),
    ):
        for given in (NULLS | more, plain):
            answer = await door.post(path, **fields | given)
            assert answer.status_code == 200, answer.text


async def test_defaults_are_those_of_openai(door: RunningDoor, server: GenerationServer) -> None:
    await door.openai.completions.create(model="tiny", prompt=[5, 6])
    spec = server.loop.submitted[-1].spec
    assert (spec.max_new_tokens, spec.sampling.temperature) == (16, 1.0)
    await door.openai.chat.completions.create(model="tiny", messages=PLAIN, stop="e")  # type: ignore[arg-type]
    spec = server.loop.submitted[-1].spec
    assert spec.max_new_tokens == 4096 - len(spec.prompt)


async def test_several_prompts_have_choices_in_their_order(door: RunningDoor) -> None:
    for prompts in (["Hello", " world", "é"], [[5, 6], [7]]):
        whole = await door.openai.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=6)
        alone = [await door.openai.completions.create(model="tiny", prompt=one, max_tokens=6) for one in prompts]
        texts = [choice.text for choice in whole.choices]
        assert texts == [one.choices[0].text for one in alone for _ in range(2)]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12 * len(prompts)
        events = await door.openai.completions.create(
            model="tiny", prompt=prompts, n=2, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        parts, usages = [""] * len(texts), []
        async for event in events:
            usages.append(event.usage)
            for choice in event.choices:
                parts[choice.index] += choice.text
        assert parts == texts
        assert usages[:-1] == [None] * (len(usages) - 1)
        assert usages[-1] == whole.usage


async def test_a_prompt_may_be_echoed(door: RunningDoor, server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client:
        text = text_of(await collect(client.generate("Hello", max_new_tokens=6)))
        assert (await completion_text(door, "Hello")) == "Hello" + text
        ids = server.model.tokenizer.encode("Hello")
        assert (await completion_text(door, ids)) == "Hello" + text


async def completion_text(door: RunningDoor, prompt: Any) -> str:
    """The text with the prompt."""
    events = await door.openai.completions.create(model="tiny", prompt=prompt, max_tokens=6, echo=True, stream=True)
    return "".join([event.choices[0].text async for event in events])


async def test_options_reach_the_gateway(door: RunningDoor, server: GenerationServer) -> None:
    extra = {
        "top_k": 7,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "cache_salt": "mine",
        "priority": 3,
        "ignore_eos": True,
    }
    await door.openai.completions.create(
        model="tiny",
        prompt="Hello",
        seed=-1,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={"5": -3},
        max_tokens=4,
        extra_body=extra | {"max_draft_tokens": 1},
    )
    spec = server.loop.submitted[-1].spec
    sampling = spec.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (7, 0.5, 1.5)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.seed) == (0.5, 0.25, 2**64 - 1)
    assert sampling.logit_bias == ((5, -3.0),)
    assert (spec.cache_salt, spec.priority, spec.max_draft_tokens, spec.stop_token_ids) == ("mine", 3, 1, frozenset())


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"prompt": "\xff"}', b"[]", b'{"a":' * 5000])
async def test_a_body_that_is_no_json_is_refused(door: RunningDoor, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        answer = await door.http.post(path, content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_what_can_be_read_but_not_written_again_is_nested_too_deeply(door: RunningDoor) -> None:
    for depth in range(900, 1000, 4):
        schema = b'{"a":' * depth + b"1" + b"}" * depth
        answer = await door.http.post("/v1/completions", content=b'{"prompt": "a", "guided_json": %s}' % schema)
        assert answer.status_code == 400, depth


async def test_the_outputs_of_a_request_are_bounded_before_each_has_a_state(door: RunningDoor) -> None:
    answer = await door.post("/v1/completions", prompt=["a"] * 300, n=16)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt": "a", "continue_final_message": False}, "continue_final_message"),
        ({"messages": PLAIN, "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": PLAIN, "add_special_tokens": True}, "add_special_tokens"),
    ],
    ids=str,
)
async def test_tokenize_ignores_no_field(door: RunningDoor, fields: dict[str, Any], param: str) -> None:
    answer = await door.post("/tokenize", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_deep_values_are_refused_or_taken_never_a_fault(door: RunningDoor) -> None:
    deep = b'{"prompt": "a", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"
    assert (await door.http.post("/v1/completions", content=deep)).status_code == 400
    kwargs = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"b": %s}}'
    for depth in (50_000, 900):
        answer = await door.http.post("/v1/chat/completions", content=kwargs % (b"[" * depth + b"]" * depth))
        assert answer.status_code == 400


async def test_another_model_is_404_and_other_paths_too(door: RunningDoor) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await door.openai.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    assert "tiny" in caught.value.message
    assert (await door.http.get("/v1/files")).json()["error"]["code"] == "not_found"
    wrong = await door.http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert [model.id async for model in door.openai.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("absence", "status", "retry_after"),
    [
        (ResourceExhaustedError("full", retry_after_ms=1500), 429, "2"),
        (UnavailableError("away"), 503, None),
    ],
)
async def test_refusals_of_the_gateway_have_their_statuses(
    door: RunningDoor, server: GenerationServer, absence: Any, status: int, retry_after: str | None
) -> None:
    await door.post("/v1/completions", **COMPLETION)
    server.absence = absence
    answer = await door.post("/v1/completions", **COMPLETION, stream=True)
    server.absence = None
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == retry_after


async def test_calls_that_arrive_together_ask_once_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AsyncClient] = []
    ask = AsyncClient.server_info

    async def counted(client: AsyncClient) -> Any:
        asked.append(client)
        return await ask(client)

    monkeypatch.setattr(AsyncClient, "server_info", counted)
    async with generation_server() as server, running_door(server.address) as door:
        answers = await asyncio.gather(*(door.post("/v1/completions", **COMPLETION) for _ in range(16)))
        assert [answer.status_code for answer in answers] == [200] * 16
        assert len(asked) == 1


async def test_without_a_gateway_all_is_unavailable() -> None:
    with unserved_address() as address:
        async with running_door(address, reconnect_s=0.2) as door:
            assert (await door.http.get("/health")).status_code == 503
            answer = await door.post("/v1/completions", **COMPLETION)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "unavailable"


async def test_the_other_calls(door: RunningDoor) -> None:
    found = (await door.post("/tokenize", prompt="Hello 你", return_token_strs=True)).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 4096
    assert (await door.post("/detokenize", tokens=found["tokens"])).json() == {"prompt": "Hello 你"}
    assert (await door.post("/tokenize", messages=PLAIN[:1])).json()["count"] > 0
    assert (await door.post("/detokenize", tokens=[99_999])).json()["error"]["param"] == "tokens[0]"
    assert (await door.http.get("/health")).status_code == 200
    assert (await door.http.get("/version")).json()["version"]
    page = (await door.http.get("/metrics")).text
    assert 'slipstream_rpcs_total{code="200",method="POST /detokenize"}' in page


async def test_the_page_has_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")
    kinds = (CompletionRequest, ChatRequest, ResponsesRequest, StreamOptions)
    fields = {field for kind in kinds for field in kind.__struct_fields__}
    assert sorted(field for field in fields if f"`{field}`" not in page) == []
