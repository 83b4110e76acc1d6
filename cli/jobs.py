"""`slipstream generate`, `jobs`, `watch` and `cancel`: jobs of a server, and the printing of their output."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING

from slipstream.cli.cancellation import StopSignals
from slipstream.common.errors import CancelledError, ConfigError
from slipstream.common.wire.job import AbortCause, FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from slipstream.cli.options import ConnectionOptions, GenerateOptions
    from slipstream.common.wire.job import JobInfo, OutputChunk

INTERRUPTED = 130
MAX_JOBS = 1000
_UNFOLDED_WIDTH = 240
_WHO_CANCELLED = {
    AbortCause.CANCELLED: "a client cancelled it",
    AbortCause.DISCONNECTED: "its last client went away",
    AbortCause.DEADLINE: "its last client's deadline was over",
    None: "a client cancelled it or went away",
}
"""None: a server of an earlier version does not tell."""


async def run_generate(
    connection: ConnectionOptions, options: GenerateOptions, text: str, *, as_json: bool, detach: bool
) -> int:
    """Prints the output as it arrives, or a JSON line for each sample at the end; gives the exit status.

    With `detach`, prints only the name of a job that runs without a connection. A signal cancels the job. A lost
    connection is told on standard error. Raises SlipstreamError as the client does.
    """
    prompt, request = options.prompt(text), options.request()
    async with connection.client(connect_timeout_s=options.connect_timeout_s) as client:
        if detach:
            print((await client.create_job(prompt, job_id=options.job_id or "", **request)).job_id)
            return 0
        output = client.generate(prompt, job_id=options.job_id or "", **request)
        return await print_output(output, num_samples=options.n or 1, as_json=as_json)


async def run_jobs(connection: ConnectionOptions, num_jobs: int, *, as_json: bool) -> int:
    """Prints the latest jobs as a table or as JSON lines; gives the exit status. Raises ConnectionLostError."""
    if not 1 <= num_jobs <= MAX_JOBS:
        raise ConfigError("limit", num_jobs, f"1 to {MAX_JOBS}")
    async with connection.client() as client:
        page = await client.list_jobs(page_size=num_jobs)
    if as_json:
        for job in page.jobs:
            print(json.dumps({**asdict(job), "created_at": job.created_at.isoformat()}))
    else:
        _print(page.jobs)
    return 0


async def run_watch_job(connection: ConnectionOptions, job_id: str, from_token: int, *, as_json: bool) -> int:
    """Prints a job's output, without the first `from_token` tokens of each sample; gives the exit status.

    A signal leaves the job as it is. Raises NotFoundError, and the error that ended the job.
    """
    async with connection.client() as client:
        num_samples = len((await client.get_job(job_id)).samples)
        output = client.watch_job(job_id, [from_token] * num_samples)
        return await print_output(output, num_samples=num_samples, as_json=as_json)


async def run_cancel(connection: ConnectionOptions, job_id: str) -> int:
    """Ends a job; gives the exit status. Raises NotFoundError."""
    async with connection.client() as client:
        await client.cancel_job(job_id)
    return 0


def _print(jobs: tuple[JobInfo, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("job", "state", "end", "tokens", "created (UTC)"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "tokens" else "left")
    for job in jobs:
        end = job.error or job.abort_cause or job.finish_reason or "-"
        table.add_row(job.job_id, job.state, end, f"{job.num_tokens}", f"{job.created_at:%Y-%m-%d %H:%M:%S}")
    Console(width=None if sys.stdout.isatty() else _UNFOLDED_WIDTH, markup=False).print(table)


async def print_output(output: AsyncGenerator[OutputChunk, None], *, num_samples: int, as_json: bool) -> int:
    """Prints a job's output as it arrives, or a JSON line for each sample at the end; gives the exit status.

    The texts of several samples, which arrive at the same time, are printed in order at the end. A signal ends it.
    """
    logging.basicConfig(format="slipstream: %(message)s")
    logging.getLogger("slipstream.client").setLevel(logging.INFO)
    is_streamed = not as_json and num_samples == 1
    chunks: list[OutputChunk] = []
    try:
        is_whole = await StopSignals().cancel(_read(output, chunks, is_streamed=is_streamed))
    finally:
        _print_rest(chunks, as_json=as_json, is_streamed=is_streamed)
    return 0 if is_whole else INTERRUPTED


async def _read(output: AsyncGenerator[OutputChunk, None], chunks: list[OutputChunk], *, is_streamed: bool) -> bool:
    """Adds all chunks of `output` to `chunks`; True at the end. Raises CancelledError if the job was cancelled."""
    async with aclosing(output) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if is_streamed:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    for chunk in chunks:
        if chunk.finish_reason is FinishReason.ABORT:
            raise CancelledError(f"job {chunk.job_id} ended before it was done: {_WHO_CANCELLED[chunk.abort_cause]}")
    return True


def _print_rest(chunks: list[OutputChunk], *, as_json: bool, is_streamed: bool) -> None:
    """Prints the samples one by one, or ends the line of a streamed one. As JSON, only those that have ended."""
    if is_streamed:
        if chunks and not _text(chunks).endswith("\n"):
            print(flush=True)
        return
    for index in sorted({chunk.sample_index for chunk in chunks}):
        sample = [chunk for chunk in chunks if chunk.sample_index == index]
        if not as_json:
            print(f"--- sample {index} ---\n{_text(sample)}", flush=True)
        elif any(chunk.usage is not None for chunk in sample):
            print(json.dumps(_report(sample)), flush=True)


def _text(chunks: list[OutputChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def _report(chunks: list[OutputChunk]) -> dict[str, object]:
    """Text, tokens, end and usage of one sample."""
    # A chunk with only the job's end may follow.
    last, usage = next((chunk, chunk.usage) for chunk in reversed(chunks) if chunk.usage is not None)
    report: dict[str, object] = {
        "job_id": last.job_id,
        "sample_index": last.sample_index,
        "text": _text(chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": last.finish_reason,
        "matched_stop": last.matched_stop,
        **asdict(usage),
    }
    logprobs = [token for chunk in chunks for token in chunk.logprobs]
    if logprobs:
        report["logprobs"] = [{"logprob": token.logprob, "top_logprobs": token.top} for token in logprobs]
    return report
