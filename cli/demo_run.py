"""One run of the demo: all prompts at once through one server, shown as they come, measured."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.cli.demo_report import DemoRun
from slipstream.cli.step_times import StepTimes
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slipstream.bundled import Prompt
    from slipstream.cli.demo_screen import Screen
    from slipstream.common.api.output_chunk import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is generated: the same in every run."""

    prompts: Sequence[Prompt]
    max_new_tokens: int
    temperature: float
    seed: int
    """Of the first prompt; the others count on from it."""


async def run_workload(server: str, metrics_port: int, workload: Workload, screen: Screen, title: str) -> DemoRun:
    """Runs all of it side by side. The steps' times are those between two scrapes around it."""
    async with AsyncClient(server) as client:
        before = await StepTimes.scrape(metrics_port)
        start = time.monotonic()
        with screen:
            outputs = await asyncio.gather(
                *(_generate(client, workload, index, screen) for index in range(len(workload.prompts)))
            )
        seconds = time.monotonic() - start
        after = await StepTimes.scrape(metrics_port)
    usages = [usage for _, usage in outputs]
    return DemoRun(
        title=title,
        token_ids=tuple(ids for ids, _ in outputs),
        seconds=seconds,
        num_verify_steps=sum(usage.num_verify_steps for usage in usages),
        total_draft_tokens=sum(usage.total_draft_tokens for usage in usages),
        total_accepted_tokens=sum(usage.total_accepted_tokens for usage in usages),
        times=after - before,
    )


async def _generate(
    client: AsyncClient, workload: Workload, index: int, screen: Screen
) -> tuple[tuple[int, ...], Usage]:
    token_ids: list[int] = []
    usage: Usage | None = None
    chunks = client.generate(
        workload.prompts[index].text,
        max_new_tokens=workload.max_new_tokens,
        temperature=workload.temperature,
        seed=workload.seed + index,
        ignore_eos=True,
    )
    async with aclosing(chunks):
        async for chunk in chunks:
            token_ids += chunk.token_ids
            usage = chunk.usage
            screen.add(index, pieces(chunk.text, chunk.text_lengths, chunk.is_draft))
    assert usage is not None, "the last chunk has the usage"
    return tuple(token_ids), usage


def pieces(text: str, lengths: Sequence[int], is_draft: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    """The text that became certain with each token, and whether that token was drafted and accepted."""
    start = 0
    for length, is_accepted in zip(lengths, is_draft, strict=True):
        if length:
            yield text[start : start + length], is_accepted
        start += length
