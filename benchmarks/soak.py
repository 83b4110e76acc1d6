"""Many clients that come, cancel and leave; afterwards the server must have the same resources in use as before.

Concurrent clients start jobs of random length and cancel some at a random token, by leaving or by CancelJob. Every
stream must be complete or cancelled and without a gap; afterwards slots and pages must be free again, and no process
may have a thread or a file descriptor more than before. Status 1 if anything is off.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from slipstream.benchmarks.models import STANDALONE, JsonOption, Models
from slipstream.benchmarks.result_files import write_json
from slipstream.benchmarks.server_watch import ResourceSnapshot, settled
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import prompts
from slipstream.client import AsyncClient

NUM_CLIENTS = 32
MAX_NEW_TOKENS = 64


@dataclass(slots=True)
class SoakReport:
    """The outcome."""

    seconds: float
    num_clients: int
    seed: int
    outcomes: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    before: ResourceSnapshot | None = None
    after: ResourceSnapshot | None = None


async def soak(stack: Stack, seconds: float, seed: int, *, num_clients: int = NUM_CLIENTS) -> SoakReport:
    """Starts the bundled models, runs the clients and compares the resources in use before and after."""
    await stack.models(Models().with_drafts(STANDALONE))
    report = SoakReport(seconds, num_clients, seed)
    async with stack.scheduler(STANDALONE) as served, AsyncClient(served.address) as client:
        await _warm_up(client, num_clients)
        report.before = await settled(client, None)
        deadline = time.monotonic() + seconds
        runs = [_client(client, random.Random(f"{seed}-{n}"), deadline, report) for n in range(num_clients)]
        await asyncio.gather(*runs)
        report.after = await settled(client, report.before)
    if report.after.exceeds(report.before):
        report.problems.append(f"before: {report.before}, after: {report.after}")
    return report


async def _client(client: AsyncClient, rng: random.Random, deadline: float, report: SoakReport) -> None:
    texts = [prompt.text for prompt in prompts()]
    while time.monotonic() < deadline:
        length = rng.randint(1, MAX_NEW_TOKENS)
        cancel_at = rng.randrange(length) if rng.random() < 0.4 else None
        by_call = rng.random() < 0.5
        job_id = f"soak-{rng.getrandbits(64):016x}"
        stream = client.generate(
            rng.choice(texts),
            job_id=job_id,
            max_new_tokens=length,
            ignore_eos=True,
            temperature=rng.choice((0.0, 0.8)),
            seed=rng.getrandbits(32),
        )
        tokens = 0
        reason: str | None = None
        async for chunk in stream:
            tokens += len(chunk.token_ids)
            reason = chunk.finish_reason
            if cancel_at is not None and tokens > cancel_at and reason is None:
                if not by_call:
                    await stream.aclose()
                    reason = "left"
                    break
                await client.cancel_job(job_id)
                cancel_at = None
        report.num_tokens += tokens
        report.outcomes[str(reason)] = report.outcomes.get(str(reason), 0) + 1
        if reason not in ("length", "abort", "left") or (reason == "length" and tokens != length):
            report.problems.append(f"{job_id}: {tokens} of {length} tokens, finish reason {reason}")


async def _warm_up(client: AsyncClient, num_clients: int) -> None:
    """Runs a request of each client, so that everything is made that is made on first use."""

    async def run() -> None:
        async for _ in client.generate(prompts()[0].text, max_new_tokens=4):
            pass

    await asyncio.gather(*(run() for _ in range(num_clients)))


def main(
    seconds: Annotated[float, typer.Option(help="Length of the run.")] = 120.0,
    json_file: JsonOption = None,
) -> None:
    """Runs the soak test."""

    async def run() -> SoakReport:
        async with Stack() as stack:
            return await soak(stack, seconds, seed=1)

    report = asyncio.run(run())
    print(f"{sum(report.outcomes.values())} jobs, {report.num_tokens} tokens: {report.outcomes}")
    write_json(asdict(report), json_file)
    sys.exit("\n".join(report.problems) if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
