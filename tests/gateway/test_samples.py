"""Several samples of one request: admitted, sent, resumed, cancelled and counted together."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from slipstream.client import AsyncClient
from slipstream.common.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from slipstream.common.wire.job import JobState, OutputChunk
from slipstream.gateway.request import sample_seed
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import (
    GenerationServer,
    collect,
    generation_server,
    logprobs_in,
    state_of,
    text_of,
    tokens_of,
)
from tests.harness.scripted_scheduler import logprobs_of
from tests.harness.tokenizers_by_kind import TEXT
from tests.harness.waiting import until


def by_sample(chunks: list[OutputChunk], n: int) -> list[list[OutputChunk]]:
    """The chunks of each sample."""
    return [[chunk for chunk in chunks if chunk.sample_index == index] for index in range(n)]


async def test_each_sample_is_whole(server: GenerationServer, client: AsyncClient) -> None:
    prompt = server.model.tokenizer.encode(TEXT)
    chunks = await collect(client.generate(TEXT, job_id="mine", n=3, max_new_tokens=100, seed=7, stop=["never there"]))
    expected = [prompt[number % len(prompt)] for number in range(100)]
    samples = by_sample(chunks, 3)
    for index, sample in enumerate(samples):
        assert tokens_of(sample) == expected
        assert text_of(sample) == server.model.tokenizer.decode(expected, skip_special_tokens=True)
        assert [chunk.finish_reason for chunk in sample] == [*(None for _ in sample[:-1]), "length"]
        usage = sample[-1].usage
        assert usage is not None
        assert (usage.seed, usage.completion_tokens) == (sample_seed(7, index), 100)
        assert usage.accepted_per_position == (34, 34)
        assert 0 < usage.mean_inter_token_latency_seconds < 1
    total = chunks[-1].job_usage
    assert total is not None
    assert [chunk.job_usage for chunk in chunks[:-1]] == [None for _ in chunks[:-1]]
    assert (total.prompt_tokens, total.completion_tokens, total.seed) == (len(prompt), 300, 7)
    assert (total.num_verify_steps, total.accepted_per_position, total.mean_accept_length) == (102, (102, 102), 3.0)
    job = await client.get_job("mine")
    assert (job.num_tokens, job.finish_reason, job.usage) == (300, "length", total)
    assert [(sample.num_tokens, sample.usage) for sample in job.samples] == [(100, s[-1].usage) for s in samples]
    # A request is one, however many samples it has.
    assert server.metric("requests_total", outcome="length") == 1
    assert server.metric("prompt_tokens_total") == len(prompt)
    assert server.metric("generation_tokens_total") == 300
    assert server.metric("time_to_first_token_seconds_count") == 1
    assert server.metric("inter_token_latency_seconds_count") == 297


async def test_tokens_behind_the_drafts_context_are_no_drafts(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.beyond_tokens = 60
    chunks = await collect(client.generate(TEXT, n=2, max_new_tokens=100))
    for usage in (chunks[-1].usage, chunks[-1].job_usage):
        assert usage is not None
        num_samples = usage.completion_tokens // 100
        assert usage.tokens_beyond_draft == 40 * num_samples
        assert (usage.num_verify_steps, usage.total_draft_tokens) == (20 * num_samples, 40 * num_samples)


async def test_all_find_room_in_the_queue_or_none() -> None:
    async with generation_server(capacity=4, slots=1) as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        await client.create_job([5], job_id="runs", max_new_tokens=3)
        await state_of(client, "runs", JobState.RUNNING)
        await client.create_job([5], job_id="waits", n=3, max_new_tokens=3)
        with pytest.raises(ResourceExhaustedError, match="too full for 2 more: 3 outputs are waiting") as caught:
            await client.create_job([5], job_id="late", n=2, max_new_tokens=3)
        assert caught.value.retry_after_ms > 0
        assert server.link.num_waiting == 3
        await client.create_job([5], job_id="last", max_new_tokens=3)
        assert server.manager.num_jobs == 3
        server.loop.may_step.set()
        assert tokens_of(await collect(client.watch_job("waits"))) == [5] * 9


async def test_cancelled_outputs_keep_no_place_in_the_queue() -> None:
    """Clients that cancel quickly are not refused, nor others for them, while the scheduler is at a long step."""
    async with generation_server(capacity=4, slots=1) as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        await client.create_job([5], job_id="runs", max_new_tokens=3)
        await state_of(client, "runs", JobState.RUNNING)
        server.loop.holds_cancelled = True
        for name in ("a", "b"):
            await client.create_job([5], job_id=name, n=4, max_new_tokens=3)
            if name == "a":
                await client.cancel_job(name)
        assert (server.link.num_waiting, server.link.num_running) == (4, 1)
        assert server.metric("requests_total", outcome="refused") == 0
        # As many as the queue holds are on their way out: further ones keep their places.
        await client.cancel_job("b")
        with pytest.raises(ResourceExhaustedError, match="the queue is full: 4 outputs are waiting"):
            await client.create_job([5], max_new_tokens=3)
        server.loop.holds_cancelled = False
        server.loop.may_step.set()
        await until(lambda: not server.link.samples)
        assert (server.link.num_waiting, server.link.num_running) == (0, 0)
        assert tokens_of(await collect(client.generate([5], n=4, max_new_tokens=3))) == [5] * 12


async def test_refused_samples_keep_no_place_in_the_queue(tmp_path: Path) -> None:
    """The first one's refusal cancels the others, when theirs have arrived and wait for the journal."""
    async with (
        generation_server(capacity=4, journal=tmp_path / "journal") as server,
        AsyncClient(server.address) as client,
    ):
        server.loop.error = UnavailableError("verify is gone")
        for number in range(4):
            with pytest.raises(UnavailableError, match="verify is gone"):
                await collect(client.generate([5], job_id=f"job-{number}", n=4, max_new_tokens=3))
        server.loop.error = None
        assert tokens_of(await collect(client.generate([5], n=4, max_new_tokens=3))) == [5] * 12


async def test_samples_that_go_on_find_room_in_the_queue_or_none_does() -> None:
    async with generation_server(capacity=4, slots=1) as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        await client.create_job([5], job_id="runs", max_new_tokens=3)
        await state_of(client, "runs", JobState.RUNNING)
        left = asyncio.create_task(collect(client.generate([5], job_id="left", n=3, max_new_tokens=3)))
        await until(lambda: server.link.num_waiting == 3)
        left.cancel()
        await state_of(client, "left", JobState.ENDED)
        await client.create_job([5], job_id="waits", n=2, max_new_tokens=3)
        with pytest.raises(ResourceExhaustedError, match="too full for 3 more: 2 outputs are waiting"):
            await collect(client.generate([5], job_id="left", n=3, max_new_tokens=3))
        assert server.link.num_waiting == 2
        server.loop.may_step.set()
        assert tokens_of(await collect(client.watch_job("waits"))) == [5] * 6
        assert tokens_of(await collect(client.generate([5], job_id="left", n=3, max_new_tokens=3))) == [5] * 9


async def test_a_cancel_ends_all(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    chunks = client.generate([5, 6], job_id="mine", n=3, max_new_tokens=9)
    first = [await anext(chunks) for _ in range(3)]
    assert sorted(chunk.sample_index for chunk in first) == [0, 1, 2]
    await client.cancel_job("mine")
    rest = await collect(chunks)
    assert sorted((chunk.sample_index, chunk.finish_reason) for chunk in rest) == [(i, "abort") for i in range(3)]
    assert (await client.get_job("mine")).finish_reason == "abort"
    assert server.metric("requests_total", outcome="abort") == 1
    # And so does leaving.
    async with aclosing(client.generate([5, 6], n=3, max_new_tokens=9)) as left:
        await anext(left)
    await server.manager.wait_idle()
    await until(lambda: len(server.loop.cancelled) == 6)


async def test_one_that_fails_takes_the_others_along(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    await client.create_job([5, 6], job_id="mine", n=2, max_new_tokens=9)
    await until(lambda: len(server.loop.running) == 2)
    server.loop.error = UnavailableError("verify is gone")
    server.loop.pause_tokens = None
    with pytest.raises(UnavailableError, match="verify is gone"):
        await collect(client.watch_job("mine"))
    job = await state_of(client, "mine", JobState.ENDED)
    assert (job.finish_reason, job.error) == (None, "verify is gone")
    assert server.metric("requests_total", outcome="error") == 1


async def test_samples_end_by_themselves(server: GenerationServer, client: AsyncClient) -> None:
    """One may wait for a slot when another is over."""
    async with generation_server(slots=1) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = 0
        await client.create_job([5, 6], job_id="mine", n=2, max_new_tokens=3)
        assert (await client.get_job("mine")).state in (JobState.WAITING, JobState.RUNNING)
        chunks = client.watch_job("mine")
        waiting = asyncio.ensure_future(anext(chunks))
        server.loop.pause_tokens = None
        first = await waiting
        assert (first.sample_index, first.finish_reason, first.job_usage) == (0, "length", None)
        (last,) = await collect(chunks)
        assert (last.sample_index, last.finish_reason) == (1, "length")
        assert last.job_usage is not None


async def test_a_client_that_comes_back_goes_on_with_each_sample(server: GenerationServer, client: AsyncClient) -> None:
    await client.create_job(TEXT, job_id="mine", n=2, max_new_tokens=20)
    await state_of(client, "mine", JobState.ENDED)
    whole = by_sample(await collect(client.watch_job("mine")), 2)
    lengths = [length for chunk in whole[0] for length in chunk.text_lengths]
    for first, second in ((0, 0), (20, 3), (3, 20), (7, 11), (20, 20)):
        rest = by_sample(await collect(client.watch_job("mine", [first, second])), 2)
        for offset, part, all_of_it in ((first, rest[0], whole[0]), (second, rest[1], whole[1])):
            assert tokens_of(part) == tokens_of(all_of_it)[offset:]
            assert text_of(part) == text_of(all_of_it)[sum(lengths[:offset]) :]
            assert part[-1].finish_reason == "length"
    # Those that are not named begin at the first.
    assert [len(tokens_of(part)) for part in by_sample(await collect(client.watch_job("mine", 5)), 2)] == [15, 20]
    assert [len(tokens_of(part)) for part in by_sample(await collect(client.watch_job("mine", [5])), 2)] == [15, 20]
    for offsets, field in (([0, 21], "from_tokens[1]"), ([0, 0, 0], "from_tokens"), (21, "from_token")):
        with pytest.raises(InvalidArgumentError) as caught:
            await collect(client.watch_job("mine", offsets))
        assert caught.value.field == field


async def test_another_number_of_samples_is_another_request(client: AsyncClient) -> None:
    await client.create_job([5], job_id="mine", n=2, max_new_tokens=3)
    again = await client.create_job([5], job_id="mine", n=2, max_new_tokens=3)
    assert len(again.samples) == 2
    with pytest.raises(AlreadyExistsError):
        await client.create_job([5], job_id="mine", n=3, max_new_tokens=3)


@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_logprobs_come_with_their_tokens(client: AsyncClient, num_top: int) -> None:
    options = {"max_new_tokens": 500, "logprobs": True, "top_logprobs": num_top}
    await client.create_job([5, 6, 7], job_id="mine", n=2, **options)  # type: ignore[arg-type]
    for offset in (0, 1, 499):
        chunks = by_sample(await collect(client.watch_job("mine", offset)), 2)[0]
        tokens = ([5, 6, 7] * 167)[offset:500]
        assert logprobs_in(chunks) == [logprobs_of(t, num_top) for t in tokens]
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    plain = await collect(client.generate([5, 6, 7], max_new_tokens=9))
    assert all(chunk.logprobs == () for chunk in plain)


async def test_the_error_of_one_sample_is_the_end_of_all(server: GenerationServer, client: AsyncClient) -> None:
    """Nobody has cancelled the others; the same request again would go on with them."""
    server.loop.pause_tokens = TOKENS_PER_STEP
    await client.create_job([5, 6], job_id="mine", n=2, max_new_tokens=9)
    await until(lambda: server.manager.get("mine").num_tokens == 2 * TOKENS_PER_STEP)
    failed, _ = server.manager.get("mine").samples
    server.manager.end(failed, error=UnavailableError("no scheduler for too long", retry_after_ms=10))
    await until(lambda: not server.link.running)
    watched = client.watch_job("mine", reconnect_s=0)
    chunks = [await anext(watched) for _ in range(2)]
    with pytest.raises(UnavailableError, match="no scheduler for too long"):
        await anext(watched)
    assert [(tokens_of(sample), sample[-1].finish_reason) for sample in by_sample(chunks, 2)] == [([5, 6, 5], None)] * 2
    server.loop.pause_tokens = None
    again = await collect(client.generate([5, 6], job_id="mine", n=2, max_new_tokens=9))
    assert [tokens_of(sample) for sample in by_sample(again, 2)] == [[5, 6] * 4 + [5]] * 2
