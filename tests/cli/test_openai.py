"""`up --openai-port` and the `openai` package: a door before the real services, which are killed, too."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Completion
from openai.types.chat import ChatCompletion

from slipstream.client import AsyncClient
from slipstream.common.wire.job import JobState
from slipstream.gateway.tokenizer import load_tokenizer
from tests.harness.running import Running, slipstream
from tests.harness.waiting import is_listening, until

MODEL = "tiny"
PROMPT = "def add(a, b):"
NUM_STREAMS = 8
"""As many as the slots of the shared `up`."""
FIRST_SEED = 50
"""From here on, no two tokens of a stream have scores so near that rounding could decide: the best leads by 4e-4."""
BACK_S = 2.0
"""A door that was killed is back after this time; a host that starts a door more slowly has four times its time."""
CONVERSATION: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]


def client_of(url: str) -> openai.AsyncOpenAI:
    """OpenAI's own client, as its users make it."""
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture
async def client(openai_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the shared `up`."""
    async with client_of(openai_url) as client:
        yield client


@pytest.fixture
async def own(chat_server: str) -> AsyncIterator[AsyncClient]:
    """Our own client, of the same server."""
    async with AsyncClient(chat_server) as client:
        yield client


async def complete(client: openai.AsyncOpenAI, **params: Any) -> Completion:
    """A completion without a stream."""
    found: Completion = await client.completions.create(
        **{"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 1.0} | params
    )
    return found


async def chat(client: openai.AsyncOpenAI, **params: Any) -> ChatCompletion:
    """An answer without a stream."""
    found: ChatCompletion = await client.chat.completions.create(
        **{"model": MODEL, "messages": CONVERSATION, "max_completion_tokens": 24, "temperature": 1.0} | params
    )
    return found


async def own_text(own: AsyncClient, prompt: str, **params: Any) -> str:
    """The text of our own client."""
    params = {"max_new_tokens": 24, "temperature": 1.0} | params
    return "".join([chunk.text async for chunk in own.generate(prompt, **params)])


async def test_a_completion_is_what_our_own_client_gets(client: openai.AsyncOpenAI, own: AsyncClient) -> None:
    first, second = await complete(client, seed=11), await complete(client, seed=11)
    assert first.choices[0].text == second.choices[0].text == await own_text(own, PROMPT, seed=11)
    assert first.choices[0].finish_reason == "length"
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (6, 24)
    assert (await complete(client, seed=12)).choices[0].text != first.choices[0].text


async def test_a_stream_has_the_same_text_in_parts(client: openai.AsyncOpenAI) -> None:
    whole = await complete(client, seed=11)
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=1.0, seed=11, stream=True
    )
    parts = [chunk.choices[0] async for chunk in stream]
    assert len(parts) > 2
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert parts[-1].finish_reason == "length"


async def test_an_answer_continues_what_the_template_writes(client: openai.AsyncOpenAI, own: AsyncClient) -> None:
    expected = await own_text(own, f"[system] Be brief.\n[user] {PROMPT}\n[assistant] ", seed=5)
    answer = await chat(client, seed=5)
    assert answer.choices[0].message.content == expected
    stream = await client.chat.completions.create(
        model=MODEL, messages=CONVERSATION, max_completion_tokens=24, temperature=1.0, seed=5, stream=True
    )
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(deltas) == expected


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    text = (await complete(client, seed=11)).choices[0].text
    stop = text[6:9]
    found = await complete(client, seed=11, stop=[stop])
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


async def test_samples_have_the_seeds_of_our_interface(client: openai.AsyncOpenAI, own: AsyncClient) -> None:
    found = await complete(client, seed=11, n=3)
    texts: dict[int, str] = {}
    async for chunk in own.generate(PROMPT, seed=11, n=3, max_new_tokens=24, temperature=1.0):
        texts[chunk.sample_index] = texts.get(chunk.sample_index, "") + chunk.text
    assert {choice.index: choice.text for choice in found.choices} == texts
    assert len(set(texts.values())) == 3


async def test_logprobs_are_those_of_our_interface(
    client: openai.AsyncOpenAI, own: AsyncClient, chat_model: Path
) -> None:
    answer = await chat(client, seed=5, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    prompt = f"[system] Be brief.\n[user] {PROMPT}\n[assistant] "
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 2}
    chunks = [chunk async for chunk in own.generate(prompt, **options)]
    own_logprobs = [logprobs for chunk in chunks for logprobs in chunk.logprobs]
    assert [item.logprob for item in content] == pytest.approx([one.logprob for one in own_logprobs], abs=1e-4)
    tokenizer = load_tokenizer(chat_model)
    for item, one in zip(content, own_logprobs, strict=True):
        expected = [(tokenizer.decode([token]), pytest.approx(logprob, abs=1e-4)) for token, logprob in one.top]
        assert [(top.token, top.logprob) for top in item.top_logprobs] == expected


async def test_every_port_is_on_loopback(chat_up: Running) -> None:
    (door,) = (child for child in chat_up.children() if "slipstream.door.main" in child.cmdline())
    addresses = [connection.laddr.ip for connection in door.net_connections("tcp") if connection.status == "LISTEN"]
    assert addresses == ["127.0.0.1", "127.0.0.1"]  # and metrics


@pytest.mark.slow
def test_the_load_command_loads_both_interfaces(openai_url: str, chat_server: str, tmp_path: Path) -> None:
    load = ("--num-prompts", "6", "--input-len", "9", "--output-len", "5", "--output", str(tmp_path / "found.json"))
    kinds: tuple[tuple[str, ...], ...] = (
        ("--openai", openai_url, "--model", MODEL, "--max-concurrency", "3"),
        ("--server", chat_server, "--request-rate", "50", "--picture", str(tmp_path / "a.svg")),
    )
    for kind in kinds:
        done = slipstream("bench", *load, *kind)
        assert done.returncode == 0, done.stderr + done.stdout
        found = json.loads((tmp_path / "found.json").read_text())
        assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 30)
        assert 0 < found["mean_ttft_ms"] <= found["mean_e2el_ms"]
        assert f"{'Successful requests':<34}{6:>12}" in done.stdout
    assert found["total_input_tokens"] == 54
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def process_of(up: Running, service: str) -> Any:
    """The process of a service."""
    (found,) = (one for one in up.children() if any(f"slipstream.{service}" == word for word in one.cmdline()))
    return found


async def texts_of(client: openai.AsyncOpenAI, on_text: Any = lambda: None) -> list[str]:
    """The texts of all streams; `on_text` is called when each has begun."""
    begun: set[int] = set()

    async def text_of(index: int) -> str:
        messages: Any = [{"role": "user", "content": f"def f{index}(a):"}]
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_completion_tokens=96,
            seed=FIRST_SEED + index,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text and index not in begun:
                begun.add(index)
                if len(begun) == NUM_STREAMS:
                    on_text()
        return text

    return await asyncio.gather(*(text_of(index) for index in range(NUM_STREAMS)))


async def start_s(path: Path) -> float:
    """Time in which a door starts on this host."""
    begun_at = time.monotonic()
    command = (sys.executable, "-m", "slipstream.door.main", "--listen", f"unix:{path}")
    door = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    await until(lambda: is_listening(str(path)))
    taken_s = time.monotonic() - begun_at
    door.kill()
    await door.wait()
    return taken_s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(openai_url: str) -> list[str]:
    """The texts of streams without a fault."""
    async with client_of(openai_url) as client:
        return await texts_of(client)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("service", ["gateway.main", "scheduler.main", "services.verify_main", "services.draft_main"])
async def test_streams_go_on_when_a_process_is_killed(
    chat_up: Running, client: openai.AsyncOpenAI, undisturbed: list[str], service: str
) -> None:
    assert len(set(undisturbed)) > 1
    assert await texts_of(client, process_of(chat_up, service).kill) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_door_that_is_killed_comes_back_and_its_jobs_end(
    chat_up: Running, client: openai.AsyncOpenAI, own: AsyncClient, undisturbed: list[str], tmp_path: Path
) -> None:
    with pytest.raises((httpx.HTTPError, openai.APIConnectionError)):
        await texts_of(client, process_of(chat_up, "door.main").kill)
    killed_at = time.monotonic()
    while True:
        with suppress(openai.APIConnectionError):
            await client.models.list()
            break
    back_s = time.monotonic() - killed_at
    assert back_s < BACK_S or back_s < 4 * await start_s(tmp_path / "door")
    async with asyncio.timeout(30):
        while any(job.state is not JobState.ENDED for job in (await own.list_jobs()).jobs):
            pass
    assert {str(job.finish_reason) for job in (await own.list_jobs()).jobs[:NUM_STREAMS]} == {"abort"}
    assert await texts_of(client) == undisturbed
