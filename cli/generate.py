"""`slipstream generate`: one prompt, its output streamed; and the printing of any job's output."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING

from slipstream.cli.cancellation import StopSignals
from slipstream.client import AsyncClient
from slipstream.common.api.output_chunk import FinishReason
from slipstream.common.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from typing import Unpack

    from slipstream.client.connection import AccessOptions
    from slipstream.client.requests import Prompt, RequestOptions
    from slipstream.common.api.output_chunk import OutputChunk

INTERRUPTED = 130


async def run_generate(
    server: str,
    prompt: Prompt,
    options: RequestOptions,
    *,
    job_id: str,
    connect_timeout_s: float,
    as_json: bool,
    **access: Unpack[AccessOptions],
) -> int:
    """Prints text as it comes, or a JSON line for each sample at the end; gives the exit status.

    A signal cancels the job. A lost connection is told on standard error. Raises SlipstreamError as
    `AsyncClient.generate` does.
    """
    async with AsyncClient(server, connect_timeout_s=connect_timeout_s, **access) as client:
        output = client.generate(prompt, job_id=job_id, **options)
        return await print_output(output, num_samples=options.get("n") or 1, as_json=as_json)


async def run_create(
    server: str,
    prompt: Prompt,
    options: RequestOptions,
    *,
    job_id: str,
    connect_timeout_s: float,
    **access: Unpack[AccessOptions],
) -> int:
    """Creates a job that runs without a connection, and prints its name. Raises as `AsyncClient.create_job` does."""
    async with AsyncClient(server, connect_timeout_s=connect_timeout_s, **access) as client:
        job = await client.create_job(prompt, job_id=job_id, **options)
    print(job.job_id)
    return 0


async def print_output(output: AsyncGenerator[OutputChunk, None], *, num_samples: int, as_json: bool) -> int:
    """Prints a job's output as it comes, or a JSON line for each sample at the end; gives the exit status.

    Several samples come at the same time, so their texts are printed one after the other, at the end, whichever that
    is. A signal ends the call.
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
    """Adds what comes to `chunks`; True at the end. Raises UnavailableError if the job was cancelled."""
    async with aclosing(output) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if is_streamed:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    if any(chunk.finish_reason is FinishReason.ABORT for chunk in chunks):
        raise UnavailableError(f"the server ended job {chunks[-1].job_id} before it was done")
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
    # Behind it, the job's end may come by itself.
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
