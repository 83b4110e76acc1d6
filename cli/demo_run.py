"""One run of the demo: all prompts at once through one server, shown as they come, measured."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from slipstream.cli.demo_report import DemoRun
from slipstream.cli.step_times import StepTimes
from slipstream.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slipstream.bundled import Prompt
    from slipstream.cli.demo_screen import Screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is generated: the same in every run."""

    prompts: Sequence[Prompt]
    max_new_tokens: int
    temperature: float
    seed: int
    """Of the first prompt; the others count on from it."""

    def request(self, index: int) -> generation_pb2.GenerateRequest:
        """For the prompt with this index."""
        return generation_pb2.GenerateRequest(
            text=self.prompts[index].text,
            sampling_params=generation_pb2.SamplingParams(
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                seed=self.seed + index,
                ignore_eos=True,
            ),
        )


async def run_workload(server: str, metrics_port: int, workload: Workload, screen: Screen, title: str) -> DemoRun:
    """Runs all of it side by side. The steps' times are those between two scrapes around it."""
    async with grpc.aio.insecure_channel(server, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        before = await StepTimes.scrape(metrics_port)
        start = time.monotonic()
        with screen:
            outputs = await asyncio.gather(
                *(_generate(stub, workload.request(index), screen, index) for index in range(len(workload.prompts)))
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
    stub: generation_pb2_grpc.GenerationStub, request: generation_pb2.GenerateRequest, screen: Screen, index: int
) -> tuple[tuple[int, ...], generation_pb2.Usage]:
    token_ids: list[int] = []
    usage = generation_pb2.Usage()
    async for response in stub.Generate(request):
        token_ids += response.token_ids
        usage = response.usage
        screen.add(index, pieces(response.text, response.text_lengths, response.is_draft))
    return tuple(token_ids), usage


def pieces(text: str, lengths: Sequence[int], is_draft: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    """The text that became certain with each token, and whether that token was drafted and accepted."""
    start = 0
    for length, is_accepted in zip(lengths, is_draft, strict=True):
        if length:
            yield text[start : start + length], is_accepted
        start += length
