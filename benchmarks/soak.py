"""Many clients that come, cancel, leave and return while all services get random faults: one end each, and no leak.

`slipstream up` serves the bundled models. Clients start jobs of random length by Generate and by CreateJob; some cancel
at a random token, some leave, some lose their stream and go on at their offset. Meanwhile services are killed, ended,
stopped and paused at random: draft and verify in the first third of the time, gateway and scheduler in the second, all
four in the last. So each process lives through many deaths of others.

- Every request must have one end, and its tokens must be the first ones of the undisturbed run of its prompt.
- A few times the clients pause. No job may then be alive, and every slot and page must be free.
- Memory, threads and descriptors of `up` and of the process of each service that lived longest must not grow behind the
  first third of its life, in which its caches fill. What it gains by the median slope of all pairs of samples must stay
  below 5 % of the memory, one thread, one descriptor, unless a slope of zero is within its 95 % confidence interval.
- Workers on a CPU keep a kernel for each number of rows that they meet, at most 56 below 512 rows (`padded_rows`). So
  that this is no slope, they meet all of them when the clients begin and after each pause: one prompt for each.

Status 1 if anything is off.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from slipstream.benchmarks.models import STANDALONE, DeviceOption, JsonOption, known_names
from slipstream.benchmarks.process_usage import Growth, Usage
from slipstream.benchmarks.result_files import host, write_json
from slipstream.benchmarks.up_server import FAULTS, SERVICES, UpServer, bundled_options, up_server
from slipstream.bundled import prompts
from slipstream.cli.cancellation import background
from slipstream.client import AsyncClient
from slipstream.common.api.job_info import JobState
from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.services.models.decoder import padded_rows

if TYPE_CHECKING:
    from slipstream.client.requests import RequestOptions

CHUNK_TOKENS = 512
"""The rows of the largest prefill step on a CPU."""
MAX_NEW_TOKENS = 64
NUM_PROMPTS = 8
PARTS = (("draft", "verify"), ("gateway", "scheduler"), SERVICES)
"""The services that have faults, in each third of the time."""
LONGEST_PAUSE_S = 4.0
NUM_SAMPLES = 180
QUIET_TIMEOUT_S = 90.0
"""A gateway that came back cancels jobs of Generate calls that do not come back after 30 s."""
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run."""

    minutes: float = 30.0
    clients: int = 16
    fault_every_s: float = 8.0
    """Mean time between faults."""
    faults: tuple[str, ...] = tuple(FAULTS)
    seed: int = 1
    device: str = "cpu"
    note: str = ""
    """Said beside the result."""

    @property
    def num_quiet(self) -> int:
        """Moments without clients: one in each third at least, one in about 2 minutes."""
        return len(PARTS) * max(1, round(self.minutes / 6))


@dataclass(slots=True)
class Report:
    """The outcome."""

    outcomes: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    faults: list[tuple[float, str, str]] = field(default_factory=list)
    """Seconds since the start, service and fault."""
    quiet: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Moments without clients: seconds since the start, free pages, pages, jobs that run or wait."""
    usage: dict[int, Usage] = field(default_factory=dict)
    """By process id."""
    problems: list[str] = field(default_factory=list)

    def growths(self) -> list[Growth]:
        """Returns the growth of `up`, and of the longest-lived process of each service."""
        longest: dict[str, Usage] = {}
        for usage in self.usage.values():
            if usage.service not in longest or len(usage.at_s) > len(longest[usage.service].at_s):
                longest[usage.service] = usage
        return [growth for usage in longest.values() for growth in usage.growths()]


class Soak:
    """The clients, the faults and the samples of a run."""

    def __init__(self, plan: Plan, server: UpServer) -> None:
        self._plan = plan
        self._server = server
        self._begun = time.monotonic()
        self._goes_on = asyncio.Event()
        self._is_over = False
        self._num_working = 0
        self._prompts = [prompt.text for prompt in prompts()[:NUM_PROMPTS]]
        self._expected: list[tuple[int, ...]] = []
        self.report = Report()

    async def run(self) -> Report:
        """Runs for the time of the plan."""
        async with AsyncClient(self._server.address) as client:
            outputs = (self._output(client, number) for number in range(2 * NUM_PROMPTS))
            self._expected = await asyncio.gather(*outputs)
        seconds, num_quiet = 60 * self._plan.minutes, self._plan.num_quiet
        self._begun, self._is_over = time.monotonic(), False
        async with asyncio.TaskGroup() as group:
            for number in range(self._plan.clients):
                group.create_task(self._client(random.Random(f"{self._plan.seed}-{number}")))
            async with background(self._sample(seconds / NUM_SAMPLES)):
                for part in range(num_quiet):
                    await self._meet_sizes()
                    self._goes_on.set()
                    services = PARTS[part * len(PARTS) // num_quiet]
                    await self._faults(random.Random(f"{self._plan.seed}-faults-{part}"), services, seconds / num_quiet)
                    await self._quiet()
            self._is_over = True
            self._goes_on.set()
        if not self.report.faults:
            self.report.problems.append("no service got a fault")
        for growth in self.report.growths():
            if growth.is_slope:
                self.report.problems.append(f"grows: {growth}")
        return self.report

    async def _faults(self, rng: random.Random, services: tuple[str, ...], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (pause_s := rng.expovariate(1 / self._plan.fault_every_s)) < deadline - time.monotonic():
            await asyncio.sleep(pause_s)
            service, fault = rng.choice(services), rng.choice(self._plan.faults)
            stopped_s, at_s = rng.uniform(0.0, LONGEST_PAUSE_S), self._now()
            # Without the service, it has not come back from a fault before.
            with suppress(KeyError, psutil.NoSuchProcess):
                await self._server.fault(service, fault, pause_s=stopped_s)
                self.report.faults.append((at_s, service, fault))
        await asyncio.sleep(max(0.0, deadline - time.monotonic()))

    async def _meet_sizes(self) -> None:
        """Has workers take in a prompt of each number of rows that they keep kernels for; no two begin alike."""
        async with AsyncClient(self._server.address) as client:
            for size in sorted({padded_rows(size) for size in range(1, CHUNK_TOKENS + 1)}):
                async for _ in client.generate([size] * size, max_new_tokens=1, ignore_eos=True):
                    pass

    async def _quiet(self) -> None:
        """Lets the clients pause, and checks that the server is back and has nothing in use."""
        self._goes_on.clear()
        try:
            async with asyncio.timeout(QUIET_TIMEOUT_S), AsyncClient(self._server.address) as client:
                await self._server.restored(STANDALONE)
                while True:
                    state = await client.server_info()
                    in_use = state.num_running + state.num_waiting
                    if not in_use and not self._num_working and state.num_free_pages == state.num_pages:
                        break
                    await asyncio.sleep(POLL_S)
                page = await client.list_jobs()
        except TimeoutError:
            self.report.problems.append(f"after {self._now():.0f} s the server did not become idle")
            return
        self.report.quiet.append((self._now(), state.num_free_pages, state.num_pages, in_use))
        alive = [job.job_id for job in page.jobs if job.state is not JobState.ENDED]
        if alive:
            self.report.problems.append(f"after {self._now():.0f} s jobs were alive that no client has: {alive}")

    async def _sample(self, interval_s: float) -> None:
        while True:
            for service, process in {"up": self._server.process, **self._server.services()}.items():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    usage = self.report.usage.setdefault(process.pid, Usage(service, process.pid))
                    usage.sample(self._now())
            await asyncio.sleep(interval_s)

    async def _client(self, rng: random.Random) -> None:
        async with AsyncClient(self._server.address) as client:
            while await self._goes_on.wait() and not self._is_over:
                self._num_working += 1
                try:
                    await self._request(client, rng)
                except SlipstreamError as error:
                    self.report.problems.append(f"after {self._now():.0f} s: {error!r}")
                finally:
                    self._num_working -= 1

    async def _request(self, client: AsyncClient, rng: random.Random) -> None:
        """Runs a request to its end, which the client may bring about at a random token."""
        number, length = rng.randrange(2 * NUM_PROMPTS), rng.randint(1, MAX_NEW_TOKENS)
        leave_at = rng.randrange(length) if rng.random() < 0.5 else None
        way = rng.choice(("cancel", "leave", "return"))
        job_id, is_created = f"soak-{rng.getrandbits(64):016x}", way == "return" or rng.random() < 0.3
        options = self._options(number, length)
        if is_created:
            await client.create_job(self._prompts[number // 2], job_id=job_id, **options)
            chunks = client.watch_job(job_id)
        else:
            chunks = client.generate(self._prompts[number // 2], job_id=job_id, **options)
        tokens: list[int] = []
        reason = ""
        while not reason:
            async for chunk in chunks:
                tokens += chunk.token_ids
                reason = str(chunk.finish_reason or "")
                if leave_at is not None and len(tokens) > leave_at and not reason:
                    leave_at = None
                    if way == "cancel":
                        await self._cancel(client, job_id)
                        continue
                    await chunks.aclose()
                    if way == "return":
                        chunks = client.watch_job(job_id, len(tokens))
                        break
                    if is_created:
                        await self._cancel(client, job_id)
                    reason = "left"
                    break
        self.report.outcomes[reason] = self.report.outcomes.get(reason, 0) + 1
        self.report.num_tokens += len(tokens)
        if tuple(tokens) != self._expected[number][: len(tokens)]:
            self.report.problems.append(f"{job_id}: other tokens than without faults")
        if reason not in ("length", "abort", "left") or (reason == "length" and len(tokens) != length):
            self.report.problems.append(f"{job_id}: {len(tokens)} of {length} tokens, finish reason {reason}")

    async def _cancel(self, client: AsyncClient, job_id: str) -> None:
        """Cancels a job; as long as the server is away, it tries again."""
        async with asyncio.timeout(QUIET_TIMEOUT_S):
            while True:
                with suppress(UnavailableError):
                    return await client.cancel_job(job_id)
                await asyncio.sleep(POLL_S)

    async def _output(self, client: AsyncClient, number: int) -> tuple[int, ...]:
        chunks = client.generate(self._prompts[number // 2], **self._options(number, MAX_NEW_TOKENS))
        return tuple([token async for chunk in chunks for token in chunk.token_ids])

    @staticmethod
    def _options(number: int, length: int) -> RequestOptions:
        """Every other request is sampled."""
        return {"max_new_tokens": length, "ignore_eos": True, "temperature": 0.8 * (number % 2), "seed": number}

    def _now(self) -> float:
        return round(time.monotonic() - self._begun, 2)


async def soak(plan: Plan) -> Report:
    """Serves the bundled models, and runs clients and faults."""
    options = bundled_options(plan.device, plan.clients)
    async with up_server(*options) as server:
        return await Soak(plan, server).run()


def main(
    minutes: Annotated[float, typer.Option(help="Length of the run.")] = Plan.minutes,
    clients: Annotated[int, typer.Option(help="Clients at a time.")] = Plan.clients,
    fault_every_s: Annotated[float, typer.Option(help="Mean time between faults.")] = Plan.fault_every_s,
    faults: Annotated[str, typer.Option(help="By commas.")] = ",".join(Plan.faults),
    seed: Annotated[int, typer.Option(help="Of clients and faults.")] = Plan.seed,
    device: DeviceOption = Plan.device,
    note: Annotated[str, typer.Option(help="A sentence on the page with the result.")] = Plan.note,
    json_file: JsonOption = None,
) -> None:
    """Runs the soak test."""
    plan = Plan(
        minutes=minutes,
        clients=clients,
        fault_every_s=fault_every_s,
        faults=known_names("--faults", faults, FAULTS),
        seed=seed,
        device=device,
        note=note,
    )
    report = asyncio.run(soak(plan))
    by_service = Counter(service for _, service, _ in report.faults)
    print(f"{sum(report.outcomes.values())} jobs, {report.num_tokens} tokens: {report.outcomes}")
    print(f"{len(report.faults)} faults: {dict(by_service)}; {len(report.quiet)} moments without clients")
    for growth in report.growths():
        print(
            f"{growth.service}: {growth.quantity} {growth.gained:+g} ({growth.low:+g} to {growth.high:+g}) in "
            f"{growth.seconds:.0f} s, most {growth.bound:g}"
        )
    content: dict[str, Any] = {
        "host": host(device),
        "plan": asdict(plan),
        **asdict(report),
        "usage": [asdict(usage) for usage in report.usage.values()],
        "growths": [{**asdict(growth), "is_slope": growth.is_slope} for growth in report.growths()],
    }
    write_json(content, json_file)
    sys.exit("\n".join(report.problems) if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
