"""Clients that others wrote, against a door: the `openai` package without an event loop, curl, LangChain, LiteLLM."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.door.test_parsers import HERMES, WEATHER
from tests.harness.doors import RunningDoor, running_door
from tests.harness.generation_server import generation_server

TEMPLATE = "{# tools <tool_call> #}{{ messages[-1].content }}"


@pytest.fixture
async def door() -> AsyncIterator[RunningDoor]:
    """A door before a gateway whose outputs are the last message, up to its </s>."""
    async with generation_server() as server, running_door(server.address) as running:
        server.model.tokenizer.chat_template, before = TEMPLATE, server.model.tokenizer.chat_template
        server.model.formats = ("hermes", "")
        yield running
        server.model.tokenizer.chat_template = before


async def test_the_openai_package_without_an_event_loop(door: RunningDoor) -> None:
    def use() -> None:
        with openai.OpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "Hello you</s>"}]
            whole = client.chat.completions.create(model="tiny", messages=messages)
            assert whole.choices[0].message.content == "Hello you"
            stream = client.chat.completions.create(model="tiny", messages=messages, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello you"
            assert client.models.retrieve("tiny").id == "tiny"

    await asyncio.to_thread(use)


async def test_curl(door: RunningDoor) -> None:
    body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 3, "stream": True})
    options = ("--silent", "--noproxy", "*", "--no-buffer", "--fail", "-H", "content-type: application/json")
    command = ("curl", *options, "--data", body, f"{door.url}/v1/completions")
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    events = done.stdout.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_langchain(door: RunningDoor) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{door.url}/v1", api_key="none", max_retries=0)
    assert (await model.ainvoke("Hello you</s>")).content == "Hello you"
    parts = [part async for part in model.astream("Hello you</s>")]
    assert "".join(str(part.content) for part in parts) == "Hello you"
    answer = await model.bind_tools([WEATHER]).ainvoke(f"{HERMES}</s>")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", {"city": "Paris"})]
    assert answer.usage_metadata["output_tokens"] > 0
    again = await model.bind_tools([WEATHER]).ainvoke(
        [("user", "a"), answer, {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "warm</s>"}]
    )
    assert again.content == "warm"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_litellm(door: RunningDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would fetch a list of prices.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    given: dict[str, Any] = {"model": "openai/tiny", "api_base": f"{door.url}/v1", "api_key": "none"}
    messages = [{"role": "user", "content": "Hello you</s>"}]
    assert (await litellm.acompletion(messages=messages, **given)).choices[0].message.content == "Hello you"
    stream = await litellm.acompletion(messages=messages, stream=True, **given)
    assert "".join([part.choices[0].delta.content or "" async for part in stream]) == "Hello you"
    called = await litellm.acompletion(
        messages=[{"role": "user", "content": f"{HERMES}</s>"}], tools=[WEATHER], **given
    )
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        await litellm.acompletion(messages=messages, top_p=3, **given)
