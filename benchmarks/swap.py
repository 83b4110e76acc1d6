"""Swaps the draft under streaming clients, and kills it: their longest gaps, and when drafts are as good again."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from slipstream.benchmarks.models import EAGLE3, NONE, STANDALONE
from slipstream.benchmarks.runner import DevicePlan, Row, benchmark, host, told, write_json
from slipstream.benchmarks.stack import UpServer, bundled_options, up_server
from slipstream.benchmarks.streams import Streams, in_ms
from slipstream.bundled import eagle3_dir, standalone_dir
from slipstream.cli.cancellation import background
from slipstream.cli.draft_swaps import request_swap
from slipstream.client import AsyncClient
from slipstream.common.wire.server import ServerState, SwapTerms

CALM_S = 3.0
"""Time before a swap in which gaps and acceptance are those of before."""
POLL_S = 0.02
BIN_TOKENS = 25
NUM_BINS = 16
RECOVERED = 0.95
TERMS = SwapTerms(judge_steps=100)
RANDOM = "random"
"""A draft with random weights."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a run."""

    clients: int = 16
    max_new_tokens: int = 800
    kills: int = 10
    swaps: tuple[str, ...] = (EAGLE3, NONE, STANDALONE, RANDOM)
    """The algorithm after each swap; standalone drafts at first."""


@dataclass(slots=True)
class Recovery:
    """Steps for each 25 tokens of a stream from when a draft takes part, over some streams and times."""

    steps: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    expected_steps: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    """Steps of the jobs that ran with the draft from their beginning, for the same tokens."""

    def add(self, streams: Streams, since: float, references: Sequence[Sequence[bool]]) -> None:
        """Adds the jobs that ran at that time. `references`: for each stream, `is_draft` of its whole job."""
        for stream, reference in zip(streams.streams, references, strict=True):
            for job in stream.jobs:
                if not job.messages or not job.messages[0].at < since < job.messages[-1].at:
                    continue
                first = sum(len(message.is_draft) for message in job.messages if message.at <= since)
                flags = list(zip(job.is_draft, reference, strict=False))[first : first + NUM_BINS * BIN_TOKENS]
                for place, (is_draft, was_draft) in enumerate(flags):
                    self.steps[place // BIN_TOKENS] += not is_draft
                    self.expected_steps[place // BIN_TOKENS] += not was_draft

    @property
    def shares(self) -> list[float]:
        """Accept length over that of the reference, for each 25 tokens that any stream had."""
        pairs = zip(self.expected_steps, self.steps, strict=True)
        return [expected / steps for expected, steps in pairs if steps]

    @property
    def tokens(self) -> int | None:
        """Tokens of a stream until the accept length is back at 95 %; None if it is not, or no stream was long enough.

        A multiple of 25.
        """
        for place, share in enumerate(self.shares):
            if min(share, sum(self.expected_steps[place:]) / sum(self.steps[place:])) >= RECOVERED:
                return BIN_TOKENS * place
        return None


class Swaps:
    """Swaps and kills the draft of a server, and measures the streams."""

    def __init__(self, server: UpServer, streams: Streams) -> None:
        """`streams` have run their undisturbed jobs, with the standalone draft."""
        self._server = server
        self._streams = streams
        self._references = {STANDALONE: [stream.jobs[0].is_draft for stream in streams.streams]}
        """By algorithm, for each stream."""

    async def swap(self, before: str, after: str, draft: Path | None) -> Row:
        """Swaps to the draft in this directory, None for none; `after` is its algorithm, or RANDOM."""
        await self._streams.settle()
        await asyncio.sleep(CALM_S)
        begun = time.monotonic()
        algorithm = STANDALONE if after == RANDOM else after
        async with background(self._joined(await self._draft(), algorithm)) as (joined,):
            answer = await request_swap(self._server.state_dir, draft, algorithm, TERMS)
            ended = time.monotonic()
            since = None if algorithm == NONE or answer.rolled_back else await joined
        await asyncio.sleep(0.5)
        gaps = self._streams.longest_gaps(begun, ended + 0.5)
        calm = self._streams.longest_gaps(begun - CALM_S, begun - 0.5)
        await self._jobs()
        recovery = Recovery()
        if since is not None:
            if algorithm not in self._references:
                self._references[algorithm] = await self._reference()
            recovery.add(self._streams, since, self._references[algorithm])
        row = {
            "before": before,
            "after": after,
            "seconds": round(ended - begun, 2),  # from the call to the answer, the new process's start included
            # Between tokens of a stream, from the call to half a second after the answer, and in 3 s before the call.
            "gap_p50_ms": in_ms(median(gaps)),
            "gap_worst_ms": in_ms(max(gaps)),
            "calm_gap_worst_ms": in_ms(max(calm)),
            "rolled_back": answer.rolled_back,
            "reason": answer.reason,
            "recovery_tokens": recovery.tokens,
        }
        for name, digits in (("accept_length", 3), ("step_ms", 3), ("tokens_per_second", 1)):
            row[f"{name}_before"] = round(getattr(answer.before, name), digits)
            row[f"{name}_after"] = round(getattr(answer.after, name), digits)
        print(told(row), flush=True)
        return row

    async def returns(self, algorithm: str, kills: int) -> Recovery:
        """Kills the draft that is there some times; returns how it returned, all times together."""
        recovery = Recovery()
        for _ in range(kills if algorithm != NONE else 0):
            await self._streams.settle()
            async with background(self._joined(await self._draft(), algorithm)) as (joined,):
                await self._server.fault("draft", "kill")
                since = await joined
            await self._jobs()
            recovery.add(self._streams, since, self._references[algorithm])
        return recovery

    async def _draft(self) -> int:
        """Returns the process id of the draft that takes part now; 0 for none."""
        async with AsyncClient(self._server.address) as client:
            return _draft_pid(await client.server_info())

    async def _joined(self, before: int, algorithm: str) -> float:
        """Waits until another draft process than `before` takes part; returns the time. Raises TimeoutError."""
        await self._server.until_state(
            lambda state: state.algorithm == algorithm and _draft_pid(state) not in (0, before), poll_s=POLL_S
        )
        return time.monotonic()

    async def _jobs(self) -> None:
        """Waits until the jobs that run now are over."""
        jobs = [stream.jobs[-1] for stream in self._streams.streams]
        await self._streams.until(lambda: all(job.is_over for job in jobs))

    async def _reference(self) -> list[list[bool]]:
        """Waits until each stream has run a whole job from now on; returns their `is_draft`."""
        numbers = [(stream, len(stream.jobs)) for stream in self._streams.streams]
        await self._streams.until(lambda: all(len(s.jobs) > n and s.jobs[n].is_over for s, n in numbers))
        return [stream.jobs[number].is_draft for stream, number in numbers]


def _draft_pid(state: ServerState) -> int:
    return next((service.pid for service in state.services if service.name == "draft"), 0)


def random_draft(folder: Path) -> Path:
    """Writes a standalone draft of the bundled one's shape with random weights."""
    torch.manual_seed(1)
    shutil.copytree(standalone_dir(), folder)
    weights = folder / "model.safetensors"
    drawn = {name: 0.02 * torch.randn_like(weight) for name, weight in load_file(weights).items()}
    save_file(drawn, weights, metadata={"format": "pt"})
    return folder


async def measure(plan: Plan) -> Row:
    """Serves, swaps and kills, and returns the run as it is in the file of results."""
    before, rows = STANDALONE, []
    with TemporaryDirectory() as directory:
        drafts = {EAGLE3: eagle3_dir(), NONE: None, STANDALONE: standalone_dir()}
        drafts[RANDOM] = random_draft(Path(directory) / RANDOM)
        async with up_server(*bundled_options(plan.device, plan.clients)) as server:
            streams = Streams(server.address, plan.clients, plan.max_new_tokens)
            await streams.reference()
            swaps = Swaps(server, streams)
            async with streams.running():
                await streams.flow(time.monotonic())
                for after in plan.swaps:
                    rows.append(await swaps.swap(before, after, drafts[after]))
                    before = before if rows[-1]["rolled_back"] else after
                recovery = await swaps.returns(STANDALONE if before == RANDOM else before, plan.kills)
    return {
        "host": host(plan.device),
        "plan": asdict(plan),
        "swaps": rows,
        "return": {"tokens": recovery.tokens, "bin_tokens": BIN_TOKENS, "accept_length_shares": recovery.shares},
        "jobs": streams.num_jobs,
        "errors": streams.errors,
    }


def problems_of(run: Row) -> list[str]:
    """Returns a line for what the swaps must do and did not."""
    found = [
        f"{row['before']} -> {row['after']}: {'rolled back' if row['rolled_back'] else 'not rolled back'}"
        for row in run["swaps"]
        if row["rolled_back"] != (row["after"] == RANDOM)
    ]
    return found + ["acceptance did not come back after the kills"] * (run["return"]["tokens"] is None)


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Swaps the draft and kills it, and prints how the streams do."""
    run = await measure(plan)
    print(f"{told(run['return'])}; {told(run, 'jobs', 'errors')}")
    write_json(run, file)
    return [*run["errors"], *problems_of(run)]
