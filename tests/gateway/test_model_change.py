"""Another model comes: what is kept of the jobs before can be read, and nothing else of their model stays."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import aclosing

import pytest

from slipstream.client import AsyncClient
from slipstream.common.errors import InternalError, UnavailableError
from slipstream.common.wire.job import JobState
from tests.harness.generation_server import (
    GenerationServer,
    collect,
    generation_server,
    model_of,
    state_of,
    text_of,
    tokens_of,
)
from tests.harness.scripted_scheduler import DESCRIPTION
from tests.harness.tokenizers_by_kind import TEXT
from tests.harness.waiting import until


def parts_of_the_model(server: GenerationServer) -> list[weakref.ref[object]]:
    """Weak references to the model and its vocabulary; the tokenizer, which both refer to, is shared by all tests."""
    model = server.link.model()
    return [weakref.ref(part) for part in (model, model.vocabulary)]


def those_alive(references: list[weakref.ref[object]]) -> list[object]:
    gc.collect()
    return [type(part).__name__ for reference in references if (part := reference()) is not None]


async def change_model(server: GenerationServer, name: str) -> None:
    server.loop.serve(model=name)
    await until(lambda: server.link.model().identity == name and server.link.description is not None)
    server.model = server.link.model()
    await until(lambda: server.link._absence is None)


async def test_kept_jobs_let_go_of_a_model_that_is_gone_and_stay_readable() -> None:
    reference = model_of(DESCRIPTION).tokenizer
    prompt = reference.encode(TEXT)
    async with generation_server() as server, AsyncClient(server.address) as client:
        options = {"max_new_tokens": 100}
        await client.create_job(TEXT, job_id="never-read", **options)
        await state_of(client, "never-read", JobState.ENDED)
        await collect(client.generate(TEXT, job_id="read", n=2, stop=["never there"], **options))
        server.loop.pause_tokens = 33
        await client.create_job(TEXT, job_id="cut-short", **options)
        await until(lambda: server.store.get("", "cut-short").num_tokens == 33)
        before = parts_of_the_model(server)
        assert len(those_alive(before)) == 2
        await change_model(server, "another")
        # Its reader gets the error that was kept with the job.
        for _ in range(2):
            with pytest.raises(UnavailableError, match="the model changed"):
                await collect(client.watch_job("cut-short"))
        await until(lambda: those_alive(before) == [])
        expected = [prompt[number % len(prompt)] for number in range(100)]
        for name in ("never-read", "read"):
            chunks = [chunk for chunk in await collect(client.watch_job(name)) if chunk.sample_index == 0]
            assert tokens_of(chunks) == expected
            assert text_of(chunks) == reference.decode(expected, skip_special_tokens=True)
        async with aclosing(client.watch_job("cut-short")) as stream:
            assert text_of([await anext(stream)]) == reference.decode(expected[:33], skip_special_tokens=True)
        await change_model(server, "a third")
        assert tokens_of(await collect(client.watch_job("never-read"))) == expected


async def test_output_that_cannot_become_text_keeps_no_tokenizer() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        await client.create_job(TEXT, job_id="broken", max_new_tokens=20)
        await client.create_job(TEXT, job_id="whole", max_new_tokens=20)
        for name in ("broken", "whole"):
            await state_of(client, name, JobState.ENDED)

        def fail(*_: object) -> None:
            raise RuntimeError("no text")

        text = server.store.get("", "broken").samples[0]._text
        text._detokenizer.push_all = fail
        before = parts_of_the_model(server)
        await change_model(server, "another")
        del text, fail
        await until(lambda: those_alive(before) == [])
        with pytest.raises(InternalError, match="could not be taken in"):
            await collect(client.watch_job("broken"))
        assert len(tokens_of(await collect(client.watch_job("whole")))) == 20


async def test_jobs_that_come_while_the_model_changes_are_of_the_new_one() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        begin, is_there, may_begin = server.manager.begin, asyncio.Event(), asyncio.Event()

        async def slow_begin(model: object) -> None:
            is_there.set()
            await may_begin.wait()
            await begin(model)

        server.manager.begin = slow_begin
        server.loop.serve(model="another")
        await is_there.wait()
        server.model = server.link.model()
        await client.create_job(TEXT, job_id="mine", max_new_tokens=20)
        assert server.store.get("", "mine").model_identity == "another"
        may_begin.set()
        assert len(tokens_of(await collect(client.watch_job("mine")))) == 20
