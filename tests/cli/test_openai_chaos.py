"""Processes killed under streams of OpenAI's interface: the text is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from slipstream.bundled import standalone_dir
from slipstream.client import AsyncClient
from slipstream.common.wire.job import JobState
from tests.harness.doors import is_listening, write_chat_model
from tests.harness.running import running_up
from tests.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.running import Running

pytestmark = pytest.mark.timeout(120)

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
NUM_STREAMS = 8
BACK_S = 2.0
"""A door that was killed is back after this time; a host that starts a door more slowly has twice its time."""


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Running]:
    """The bundled model in float32, with a draft."""
    model = write_chat_model(tmp_path / "tiny", TEMPLATE)
    options = ("--target", str(model), "--draft", str(standalone_dir()), "--openai-port", "0", "--device", "cpu")
    with running_up(tmp_path / "state", *options, "--slots", str(NUM_STREAMS)) as up:
        yield up


def url_of(up: Running) -> str:
    """Its address."""
    found = re.search(r"OpenAI's interface: (\S+)", up.output())
    assert found
    return found[1]


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
            model="tiny",
            messages=messages,
            max_completion_tokens=160,
            seed=index,
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


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("service", ["gateway.main", "scheduler.main", "services.verify_main", "services.draft_main"])
async def test_streams_go_on_when_a_process_is_killed(up: Running, service: str) -> None:
    async with openai.AsyncOpenAI(base_url=url_of(up), api_key="none", max_retries=0) as client:
        undisturbed = await texts_of(client)
        assert len(set(undisturbed)) > 1
        assert await texts_of(client, process_of(up, service).kill) == undisturbed


async def test_a_door_that_is_killed_comes_back_and_its_jobs_end(up: Running, tmp_path: Path) -> None:
    async with (
        openai.AsyncOpenAI(base_url=url_of(up), api_key="none", max_retries=0) as client,
        AsyncClient((tmp_path / "state" / "server").read_text()) as own,
    ):
        with pytest.raises((httpx.HTTPError, openai.APIConnectionError)):
            await texts_of(client, process_of(up, "door.main").kill)
        killed_at = time.monotonic()
        while True:
            with suppress(openai.APIConnectionError):
                await client.models.list()
                break
        back_s = time.monotonic() - killed_at
        assert back_s < BACK_S or back_s < 2 * await start_s(tmp_path / "door")
        async with asyncio.timeout(30):
            while any(job.state is not JobState.ENDED for job in (await own.list_jobs()).jobs):
                pass
        assert {str(job.finish_reason) for job in (await own.list_jobs()).jobs} == {"abort"}
        assert len(await texts_of(client)) == NUM_STREAMS
