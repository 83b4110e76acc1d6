"""`slipstream generate --detach`, `jobs`, `watch` and `cancel`, against the real services with the bundled model."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import replace

import pytest

from slipstream.cli.jobs import _report, print_output
from slipstream.client import Client
from slipstream.common.errors import CancelledError, UnavailableError
from slipstream.common.wire.job import AbortCause, FinishReason, JobState, OutputChunk
from tests.harness.example_states import USAGE
from tests.harness.running import Running, slipstream, until
from tests.harness.waiting import block_until

MANY = ("--max-new-tokens", "100")
"""Tokens of a job, of which `held_server` generates three."""


def create(server: str, *options: str) -> str:
    """Creates a job that runs without a connection; returns its name."""
    name = uuid.uuid4().hex
    created = slipstream("generate", "--server", server, "--detach", "--job-id", name, *options, "class Queue:")
    assert (created.returncode, created.stdout) == (0, f"{name}\n")
    return name


def test_a_sample_is_reported_though_the_end_of_the_job_follows_it() -> None:
    end = OutputChunk(job_id="a", token_offset=0, token_ids=(5,), finish_reason=FinishReason.LENGTH, usage=USAGE)
    report = _report([end, OutputChunk(job_id="a", token_offset=1, job_usage=USAGE)])
    assert (report["finish_reason"], report["token_ids"]) == (FinishReason.LENGTH, [5])
    assert report["completion_tokens"] == USAGE.completion_tokens


def test_a_detached_job_is_watched_from_any_token_on(server: str) -> None:
    name = create(server, "--max-new-tokens", "12")
    text = slipstream("watch", "--server", server, name).stdout
    streamed = slipstream("generate", "--server", server, "--max-new-tokens", "12", "class Queue:").stdout
    assert text.strip()
    assert text == streamed
    whole, rest = (
        json.loads(slipstream("watch", "--server", server, "--json", "--from-token", start, name).stdout)
        for start in ("0", "5")
    )
    assert rest["token_ids"] == whole["token_ids"][5:]
    too_far = slipstream("watch", "--server", server, "--from-token", "13", name)
    assert (too_far.returncode, too_far.stdout) == (2, "")
    assert too_far.stderr == "slipstream: error: --from-token: got 13, accepted: 0 to 12, the tokens that there are\n"


def test_every_sample_is_watched(server: str) -> None:
    name = create(server, "--max-new-tokens", "6", "--n", "2", "--temperature", "0.8", "--seed", "4")
    reports = [json.loads(line) for line in slipstream("watch", "--server", server, "--json", name).stdout.splitlines()]
    assert [report["sample_index"] for report in reports] == [0, 1]
    assert "--- sample 1 ---" in slipstream("watch", "--server", server, name).stdout


def test_jobs_are_listed_with_their_ends(server: str) -> None:
    first, second = create(server, "--max-new-tokens", "3"), create(server, "--max-new-tokens", "4")
    with Client(server) as client:
        for name in (first, second):
            assert [*client.watch_job(name)]
    latest = [json.loads(line) for line in slipstream("jobs", "--server", server, "--json").stdout.splitlines()]
    names = [job["job_id"] for job in latest]
    assert names.index(second) < names.index(first)
    assert latest[names.index(first)]["num_tokens"] == 3
    table = [line.split() for line in slipstream("jobs", "--server", server).stdout.splitlines()]
    assert [second, "ended", "length", "4"] in [words[:4] for words in table]
    assert len(slipstream("jobs", "--server", server, "--limit", "1", "--json").stdout.splitlines()) == 1
    assert "--limit: got 0" in slipstream("jobs", "--server", server, "--limit", "0").stderr


def test_a_job_is_cancelled_by_its_name(held_server: str) -> None:
    name = create(held_server, *MANY)
    assert slipstream("cancel", "--server", held_server, name).returncode == 0
    watched = slipstream("watch", "--server", held_server, name)
    assert (watched.returncode, watched.stderr) == (
        1,
        f"slipstream: error: job {name} ended before it was done: a client cancelled it\n",
    )
    assert slipstream("cancel", "--server", held_server, name).returncode == 0
    listed = slipstream("jobs", "--server", held_server).stdout.splitlines()
    assert [name, "ended", "cancelled"] in [line.split()[:3] for line in listed]
    unknown = slipstream("cancel", "--server", held_server, uuid.uuid4().hex)
    assert unknown.returncode == 1
    assert "there is no job" in unknown.stderr


def test_what_a_cancelled_job_had_is_printed(held_server: str) -> None:
    name = create(held_server, *MANY, "--n", "2", "--temperature", "0.8")
    with Client(held_server) as client:
        block_until(lambda: all(sample.num_tokens for sample in client.get_job(name).samples))
        client.cancel_job(name)
        texts = ["", ""]
        for chunk in client.watch_job(name):
            texts[chunk.sample_index] += chunk.text
    assert all(texts)
    watched = slipstream("watch", "--server", held_server, name)
    assert watched.stdout == "".join(f"--- sample {index} ---\n{text}\n" for index, text in enumerate(texts))
    as_json = slipstream("watch", "--server", held_server, "--json", name)
    reports = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [(report["text"], report["finish_reason"]) for report in reports] == [(text, "abort") for text in texts]
    for ended in (watched, as_json):
        assert (ended.returncode, ended.stderr) == (
            1,
            f"slipstream: error: job {name} ended before it was done: a client cancelled it\n",
        )


async def broken_output() -> AsyncGenerator[OutputChunk, None]:
    """Yields the whole of one of two samples, a part of the other, and an error."""
    end = OutputChunk(job_id="a", token_offset=0, token_ids=(5,), text="whole", finish_reason=FinishReason.LENGTH)
    yield replace(end, usage=USAGE)
    yield OutputChunk(job_id="a", token_offset=0, token_ids=(6,), text="part", sample_index=1)
    raise UnavailableError("verify is gone")


@pytest.mark.parametrize(
    ("num_samples", "as_json", "expected"),
    [
        (2, False, "--- sample 0 ---\nwhole\n--- sample 1 ---\npart\n"),
        (1, False, "wholepart\n"),
        (2, True, '{"job_id": "a", "sample_index": 0, "text": "whole",'),
    ],
)
async def test_what_came_before_an_error_is_printed(
    num_samples: int, as_json: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnavailableError, match="verify is gone"):
        await print_output(broken_output(), num_samples=num_samples, as_json=as_json)
    printed = capsys.readouterr().out
    assert printed.startswith(expected) if as_json else printed == expected
    assert printed.count("\n") == (1 if as_json else expected.count("\n"))


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (AbortCause.DISCONNECTED, "its last client went away"),
        (AbortCause.DEADLINE, "its last client's deadline was over"),
        (None, "a client cancelled it or went away"),
    ],
)
async def test_who_ended_a_job_is_told(cause: AbortCause | None, expected: str) -> None:
    async def output() -> AsyncGenerator[OutputChunk, None]:
        yield OutputChunk(job_id="a", token_offset=0, finish_reason=FinishReason.ABORT, abort_cause=cause)

    with pytest.raises(CancelledError, match=f"^job a ended before it was done: {expected}$"):
        await print_output(output(), num_samples=1, as_json=False)


def test_a_watch_that_is_interrupted_leaves_the_job(held_server: str) -> None:
    name = create(held_server, *MANY)
    with closing(Running("watch", "--server", held_server, name)) as watching:
        until(lambda: bool(watching.output()), watching)
        watching.signal(signal.SIGINT)
        assert watching.end() == 130
    with Client(held_server) as client:
        assert client.get_job(name).state is JobState.RUNNING
        client.cancel_job(name)
        assert [*client.watch_job(name)]
        assert client.get_job(name).state is JobState.ENDED
