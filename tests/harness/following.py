"""What a test does with a job's output."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from slipstream.client import AsyncClient
    from slipstream.common.api.job_info import JobInfo, JobState
    from slipstream.common.api.output_chunk import OutputChunk


async def collect(chunks: AsyncIterable[OutputChunk]) -> list[OutputChunk]:
    """Everything that comes."""
    return [chunk async for chunk in chunks]


def tokens_of(chunks: list[OutputChunk]) -> list[int]:
    """The tokens of a job."""
    return [token for chunk in chunks for token in chunk.token_ids]


def text_of(chunks: list[OutputChunk]) -> str:
    """The text of a job."""
    return "".join(chunk.text for chunk in chunks)


async def state_of(client: AsyncClient, job_id: str, state: JobState) -> JobInfo:
    """Waits until a job has come to a state."""
    async with asyncio.timeout(30):
        while (info := await client.get_job(job_id)).state is not state:
            pass
    return info
