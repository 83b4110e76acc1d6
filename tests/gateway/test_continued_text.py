"""The text of a completion continues its prompt's, that of an answer stands alone; for any reader, after any fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from slipstream.client import AsyncClient
from slipstream.common.wire.job import JobState
from tests.harness.generation_server import collect, generation_server, killed, model_of, state_of, text_of, tokens_of
from tests.harness.scripted_scheduler import DESCRIPTION
from tests.harness.tokenizers_by_kind import text_after
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.wire.job import OutputChunk
    from tests.harness.generation_server import GenerationServer

KINDS = ("llama", "byte level", "wordpiece", "suffix")
TEMPLATE = "{{ messages[0].content }}"
CHAT = [{"role": "user", "content": "Hello world"}]
PAUSE = 3
NUM_TOKENS = 20


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of tokenizer, which has a chat template."""
    tokenizer = model_of(DESCRIPTION, request.param).tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    return str(request.param)


def requests_to(server: GenerationServer) -> dict[str, dict[str, Any]]:
    """By job id; the fake loop's output repeats the prompt."""
    tokenizer = server.model.tokenizer
    ids = [*tokenizer.encode(" world"), *tokenizer.encode("你", add_special_tokens=False)]
    whole = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 3}
    return {
        "text": {"prompt": "Hello world", **whole},
        "ids": {"prompt": ids, **whole},
        "samples": {"prompt": " Hello", "n": 2, **whole},
        "chat": {"prompt": CHAT, **whole},
        "stop": {"prompt": "Hello world", "stop": [expected_text(server, "Hello world", 6)[:2]], **whole},
    }


def prompt_ids(server: GenerationServer, prompt: Any) -> list[int]:
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        return prompt
    is_chat = not isinstance(prompt, str)
    ids: list[int] = server.model.tokenizer.encode("Hello world" if is_chat else prompt, add_special_tokens=not is_chat)
    return ids


def expected_text(server: GenerationServer, prompt: Any, num_tokens: int = NUM_TOKENS) -> str:
    ids = prompt_ids(server, prompt)
    output = (ids * NUM_TOKENS)[:num_tokens]
    return text_after(server.model.tokenizer, () if prompt is CHAT else ids, output)


async def check(server: GenerationServer, client: AsyncClient) -> None:
    """Reads each job from every token on."""
    for job_id, request in requests_to(server).items():
        expected = "" if "stop" in request else expected_text(server, request["prompt"])
        whole = await collect(client.watch_job(job_id))
        for index in range(request.get("n", 1)):
            own = of_sample(whole, index)
            assert text_of(own) == expected, job_id
            lengths = [length for chunk in own for length in chunk.text_lengths]
            for offset in range(len(tokens_of(own)) + 1):
                offsets = [0] * index + [offset]
                rest = of_sample(await collect(client.watch_job(job_id, offsets)), index)
                assert text_of(rest) == expected[sum(lengths[:offset]) :], (job_id, offset)


def of_sample(chunks: list[OutputChunk], index: int) -> list[OutputChunk]:
    return [chunk for chunk in chunks if chunk.sample_index == index]


async def create_all(server: GenerationServer, client: AsyncClient) -> None:
    for job_id, request in requests_to(server).items():
        await client.create_job(job_id=job_id, **request)


async def test_text_continues_the_prompt(kind: str) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        await create_all(server, client)
        await check(server, client)


async def test_text_is_the_same_after_a_gateway_was_killed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    async with generation_server(kind=kind, journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        await create_all(server, client)
        await until(lambda: all(job.is_over or job.num_tokens >= PAUSE for job in server.store.jobs()))
        await server.manager.journal.flush()
        left = killed(path)
    async with generation_server(kind=kind, journal=left) as server, AsyncClient(server.address) as client:
        await check(server, client)
        await server.manager.journal.flush()
        again = killed(left)
    async with generation_server(kind=kind, journal=again) as server, AsyncClient(server.address) as client:
        await check(server, client)


async def test_text_is_the_same_where_its_caller_left_and_came_back(kind: str) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        request = requests_to(server)["text"]
        server.loop.pause_tokens = PAUSE
        chunks = client.generate(job_id="text", **request)
        await anext(chunks)
        await chunks.aclose()
        assert (await state_of(client, "text", JobState.ENDED)).finish_reason == "abort"
        server.loop.pause_tokens = None
        assert text_of(await collect(client.generate(job_id="text", **request))) == expected_text(
            server, request["prompt"]
        )
