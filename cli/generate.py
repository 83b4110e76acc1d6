"""`slipstream generate`: one prompt, its output streamed."""

from __future__ import annotations

import json
import sys
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.cli.stop_signals import StopSignals
from slipstream.client import AsyncClient
from slipstream.common.chunk import FinishReason
from slipstream.common.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.chunk import Chunk

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """A prompt and how to continue it; what is None is the server's to decide."""

    prompt: str
    max_new_tokens: int | None
    temperature: float | None
    seed: int | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    ignore_eos: bool
    stop_token_ids: Sequence[int]


async def run_generate(server: str, options: GenerateOptions, *, as_json: bool) -> int:
    """Prints text as it comes, or one JSON line at the end; gives the exit status. A signal cancels the job.

    Raises SlipstreamError as the server does, and when it is not there.
    """
    try:
        chunks = await StopSignals().cancel(_generate(server, options, is_streamed=not as_json))
    except UnavailableError as error:
        raise UnavailableError(f"server at {server}: {error}") from error
    if chunks is None:
        return INTERRUPTED
    if as_json:
        print(json.dumps(_report(chunks)), flush=True)
    elif not "".join(chunk.text for chunk in chunks).endswith("\n"):
        print(flush=True)
    return 0


async def _generate(server: str, options: GenerateOptions, *, is_streamed: bool) -> list[Chunk]:
    chunks: list[Chunk] = []
    async with AsyncClient(server) as client:
        stream = client.generate(
            options.prompt,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            ignore_eos=options.ignore_eos,
            stop_token_ids=options.stop_token_ids,
        )
        async with aclosing(stream):
            async for chunk in stream:
                chunks.append(chunk)
                if is_streamed:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
    if chunks[-1].finish_reason is FinishReason.ABORT:
        raise UnavailableError(f"the server ended job {chunks[-1].job_id} before it was done")
    return chunks


def _report(chunks: list[Chunk]) -> dict[str, object]:
    last, usage = chunks[-1], chunks[-1].usage
    assert usage is not None, "the last chunk has the usage"
    return {
        "job_id": last.job_id,
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": last.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_draft_tokens": usage.total_draft_tokens,
        "total_accepted_tokens": usage.total_accepted_tokens,
        "num_verify_steps": usage.num_verify_steps,
        "mean_accept_length": usage.mean_accept_length,
        "seed": usage.seed,
        "time_to_first_token_seconds": usage.time_to_first_token_seconds,
        "end_to_end_seconds": usage.end_to_end_seconds,
    }
