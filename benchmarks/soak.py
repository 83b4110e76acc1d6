"""Many clients that come, cancel, leave and return while all services get random faults: one end each, and no leak."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import mean, median

import psutil

from slipstream.benchmarks.models import STANDALONE
from slipstream.benchmarks.runner import DevicePlan, Names, Row, benchmark, host, told, write_json
from slipstream.benchmarks.stack import FAULTS, SERVICES, UpServer, bundled_options, up_server
from slipstream.bundled import prompts
from slipstream.cli.cancellation import background
from slipstream.client import AsyncClient
from slipstream.client.requests import RequestOptions
from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.common.settings import setting
from slipstream.common.wire.job import JobState
from slipstream.services.models.linear import padded_rows

CHUNK_TOKENS = 512
"""The rows of the largest prefill step on a CPU."""
MAX_NEW_TOKENS = 64
NUM_PROMPTS = 8
PARTS = (("draft", "verify"), ("gateway", "scheduler"), SERVICES)
"""The services that have faults, in each third of the time."""
LONGEST_PAUSE_S = 4.0
NUM_SAMPLES = 180
QUIET_TIMEOUT_S = 90.0
"""A gateway that is back cancels jobs of Generate calls that do not come back after 30 s."""
POLL_S = 0.1
WARM_UP = 1 / 3
"""The share of a process's life in which caches fill: a gateway has as many ended jobs as it keeps, allocators have
met the largest steps."""
LEAST_FIT_S = 60.0
"""A process that lived for less is not judged."""
BOUNDS = {"memory_mib": 0.05, "threads": 1.0, "descriptors": 1.0}
"""The most that a process may gain: a share of its mean memory; a number of threads and descriptors."""


@dataclass(slots=True)
class Usage:
    """Samples of the memory, threads and descriptors of one process."""

    service: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    """Since the start of the run."""
    memory_mib: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def sample(self, at_s: float) -> None:
        """Adds what the process has now. Raises psutil.NoSuchProcess."""
        process = psutil.Process(self.pid)
        with process.oneshot():
            memory, threads, descriptors = process.memory_info().rss, process.num_threads(), process.num_fds()
        self.at_s.append(at_s)
        self.memory_mib.append(round(memory / 2**20, 1))
        self.threads.append(threads)
        self.descriptors.append(descriptors)

    def growths(self) -> list[Row]:
        """Returns the growth of each quantity after the warm-up; none for a process that lived too briefly."""
        first = int(WARM_UP * len(self.at_s))
        times = self.at_s[first:]
        if not times or times[-1] - times[0] < LEAST_FIT_S:
            return []
        found = []
        for name, bound in BOUNDS.items():
            values = getattr(self, name)[first:]
            seconds = times[-1] - times[0]
            gained, low, high = (round(slope * seconds, 3) for slope in slopes(times, values))
            most = round(bound * mean(values) if name == "memory_mib" else bound, 3)
            row = {"service": self.service, "quantity": name, "seconds": round(seconds), "bound": most}
            # Gained over these seconds, and the ends of its 95 % confidence interval; a slope is not there by chance.
            row |= {"gained": gained, "low": low, "high": high, "is_slope": gained > most and low > 0}
            found.append(row)
        return found


def slopes(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """The median slope of all pairs of samples (Theil and Sen), and the ends of its 95 % confidence interval.

    Single samples that lie far off, such as those of a moment without an epoch, do not change it.
    """
    points = zip(times, values, strict=True)
    pairs = sorted((after[1] - before[1]) / (after[0] - before[0]) for before, after in combinations(points, 2))
    count = len(times)
    # Of Kendall's score, whose deviation says which pair's slope is at the interval's end.
    deviation = (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    low = max(0, int((len(pairs) - 1.96 * deviation) / 2))
    return median(pairs), pairs[low], pairs[-1 - low]


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a run."""

    minutes: float = setting(30.0, help="Length of the run.")
    clients: int = setting(16, help="Clients at a time.", low=1, high=4096)
    fault_every_s: float = setting(8.0, help="Mean time between faults.")
    faults: Names = Names.of(FAULTS)
    seed: int = setting(1, help="Of clients and faults.")
    note: str = setting("", help="A sentence on the page with the result.")

    @property
    def num_quiet(self) -> int:
        """Moments without clients: one in each third at least, one in about 2 minutes."""
        return len(PARTS) * max(1, round(self.minutes / 6))


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
        self._outcomes: Counter[str] = Counter()
        self._num_tokens = 0
        self._faults: list[tuple[float, str, str]] = []
        self._quiet: list[tuple[float, int, int, int]] = []
        self._usage: dict[int, Usage] = {}
        self._problems: list[str] = []

    async def run(self) -> Row:
        """Runs for the time of the plan; returns the outcome as it is in the file of results."""
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
                    rng = random.Random(f"{self._plan.seed}-faults-{part}")
                    await self._give_faults(rng, PARTS[part * len(PARTS) // num_quiet], seconds / num_quiet)
                    await self._pause()
            self._is_over = True
            self._goes_on.set()
        return self._report()

    def _report(self) -> Row:
        longest: dict[str, Usage] = {}
        for usage in self._usage.values():
            if usage.service not in longest or len(usage.at_s) > len(longest[usage.service].at_s):
                longest[usage.service] = usage
        growths = [growth for usage in longest.values() for growth in usage.growths()]
        problems = [] if self._faults else ["no service got a fault"]
        problems += [f"grows: {growth}" for growth in growths if growth["is_slope"]]
        return {
            "host": host(self._plan.device),
            "plan": asdict(self._plan),
            "outcomes": self._outcomes,
            "num_tokens": self._num_tokens,
            "faults": self._faults,  # seconds since the start, service and fault
            # Moments without clients: seconds since the start, free pages, pages, jobs that run or wait.
            "quiet": self._quiet,
            "usage": [asdict(usage) for usage in self._usage.values()],
            "problems": self._problems + problems,
            "growths": growths,  # of `up`, and of the process of each service that lived longest
        }

    async def _give_faults(self, rng: random.Random, services: tuple[str, ...], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (pause_s := rng.expovariate(1 / self._plan.fault_every_s)) < deadline - time.monotonic():
            await asyncio.sleep(pause_s)
            service, fault = rng.choice(services), rng.choice(self._plan.faults)
            stopped_s, at_s = rng.uniform(0.0, LONGEST_PAUSE_S), self._now()
            # Without the service, it has not come back from a fault before.
            with suppress(KeyError, psutil.NoSuchProcess):
                await self._server.fault(service, fault, pause_s=stopped_s)
                self._faults.append((at_s, service, fault))
        await asyncio.sleep(max(0.0, deadline - time.monotonic()))

    async def _meet_sizes(self) -> None:
        """Has workers take in a prompt of each number of rows that they keep kernels for; no two begin alike."""
        async with AsyncClient(self._server.address) as client:
            for size in sorted({padded_rows(size) for size in range(1, CHUNK_TOKENS + 1)}):
                async for _ in client.generate([size] * size, max_new_tokens=1, ignore_eos=True):
                    pass

    async def _pause(self) -> None:
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
            self._problem("the server did not become idle")
            return
        self._quiet.append((self._now(), state.num_free_pages, state.num_pages, in_use))
        if alive := [job.job_id for job in page.jobs if job.state is not JobState.ENDED]:
            self._problem(f"jobs were alive that no client has: {alive}")

    async def _sample(self, interval_s: float) -> None:
        while True:
            for service, process in {"up": self._server.process, **self._server.services()}.items():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    self._usage.setdefault(process.pid, Usage(service, process.pid)).sample(self._now())
            await asyncio.sleep(interval_s)

    async def _client(self, rng: random.Random) -> None:
        async with AsyncClient(self._server.address) as client:
            while await self._goes_on.wait() and not self._is_over:
                self._num_working += 1
                try:
                    await self._request(client, rng)
                except SlipstreamError as error:
                    self._problem(repr(error))
                finally:
                    self._num_working -= 1

    async def _request(self, client: AsyncClient, rng: random.Random) -> None:
        """Runs a request to its end, which the client may bring about at a random token."""
        number, length = rng.randrange(2 * NUM_PROMPTS), rng.randint(1, MAX_NEW_TOKENS)
        leave_at = rng.randrange(length) if rng.random() < 0.5 else None
        way = rng.choice(("cancel", "leave", "return"))
        job_id, is_created = f"soak-{rng.getrandbits(64):016x}", way == "return" or rng.random() < 0.3
        prompt, options = self._prompts[number // 2], self._options(number, length)
        if is_created:
            await client.create_job(prompt, job_id=job_id, **options)
            chunks = client.watch_job(job_id)
        else:
            chunks = client.generate(prompt, job_id=job_id, **options)
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
        self._outcomes[reason] += 1
        self._num_tokens += len(tokens)
        if tuple(tokens) != self._expected[number][: len(tokens)]:
            self._problem(f"{job_id} has other tokens than without faults")
        if reason not in ("length", "abort", "left") or (reason == "length" and len(tokens) != length):
            self._problem(f"{job_id} has {len(tokens)} of {length} tokens, finish reason {reason}")

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

    def _problem(self, text: str) -> None:
        self._problems.append(f"after {self._now():.0f} s: {text}")

    def _now(self) -> float:
        return round(time.monotonic() - self._begun, 2)


async def soak(plan: Plan) -> Row:
    """Serves the bundled models, and runs clients and faults."""
    async with up_server(*bundled_options(plan.device, plan.clients)) as server:
        return await Soak(plan, server).run()


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Runs the soak test."""
    found = await soak(plan)
    print(told(found, "outcomes", "num_tokens"))
    for growth in found["growths"]:
        print(told(growth))
    write_json(found, file)
    problems: list[str] = found["problems"]
    return problems
