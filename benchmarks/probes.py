"""Probes of a gateway: large, hostile and many requests, while health must answer and the event loop go on.

The workers have dummy kernels in place of models. Each probe runs for some seconds, with health checks from a process
of its own meanwhile. Status 1 if a request holds the gateway's event loop for more than 20 ms of its thread's time,
health takes more than 100 ms at the 99th percentile, unfinished messages cost more than 256 MiB of memory, or a request
ends as it must not: refused without RetryInfo where it could come again, or refused at all where there is room.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import grpc.aio
import psutil
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from slipstream.benchmarks.half_messages import HalfMessages
from slipstream.benchmarks.health_checks import health_checks
from slipstream.benchmarks.hostile_requests import MIB, hostile_requests
from slipstream.benchmarks.runner import Names, benchmark, host, write_json
from slipstream.benchmarks.stack import LOG_DIR, Stack
from slipstream.benchmarks.watched_gateway import StallFile, watched_gateway
from slipstream.common.rpc.address import proxy_options
from slipstream.common.rpc.interceptor import HEALTH_SERVICE
from slipstream.common.settings import Settings, setting
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from slipstream.benchmarks.health_checks import HealthChecks

MOST_STALL_MS = 20.0
MOST_HEALTH_P99_MS = 100.0
MOST_MEMORY_MIB = 256.0
"""That unfinished messages may take: gRPC's buffers are up to twice as large as what has arrived."""
KERNELS_MS = (5.0, 60.0)
"""Lengths of the draft's and verify's kernels: a job with the whole context takes half a minute."""
SLOTS = 64
QUEUE = 1024
KEPT_JOBS = 8192
SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name

KEY = "a-key-of-the-probes-0123456789"
AUTHORIZATION = (("authorization", f"Bearer {KEY}"),)

_JOB_IDS = (f"probe-{number}" for number in count())


@dataclass(slots=True)
class Target:
    """A gateway under probe, and the outcome of the calls to it."""

    address: str
    seconds: float
    """How long a probe goes on."""
    scale: float = 1.0
    """Times the number of calls of a probe."""
    codes: Counter[str] = field(default_factory=Counter)
    """Calls by their status; a RESOURCE_EXHAUSTED without RetryInfo has a name of its own."""
    memory_mib: float = 0.0
    """That the gateway's process gained at most, in a probe that looks at it."""

    def number(self, most: int) -> int:
        """`most` in a whole run, fewer in a sampled one."""
        return max(2, round(most * self.scale))

    def connect(self) -> grpc.aio.Channel:
        """A connection of its own."""
        options = [*proxy_options(self.address), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(self.address, options=options)

    async def call(self, channel: grpc.aio.Channel, method: str, request: bytes | Message, kind: Any = None) -> Any:
        """Makes a call and counts its outcome. Returns its answer, decoded if `kind` says as what; None if refused."""
        raw = request.SerializeToString() if isinstance(request, Message) else request
        decode = None if kind is None else kind.FromString
        try:
            answer = await channel.unary_unary(f"/{SERVICE}/{method}", response_deserializer=decode)(
                raw, metadata=AUTHORIZATION
            )
        except grpc.aio.AioRpcError as error:
            self.codes[code_of(error)] += 1
            return None
        self.codes["OK"] += 1
        return answer

    async def stream(self, channel: grpc.aio.Channel, method: str, request: Message) -> None:
        """Reads a stream to its end, and counts its outcome."""
        try:
            async for _ in channel.unary_stream(f"/{SERVICE}/{method}")(
                request.SerializeToString(), metadata=AUTHORIZATION
            ):
                pass
        except grpc.aio.AioRpcError as error:
            self.codes[code_of(error)] += 1
        else:
            self.codes["OK"] += 1

    async def create(self, channel: grpc.aio.Channel, **sampling: Any) -> str:
        """Creates a job that runs on by itself, and returns its id."""
        job_id = next(_JOB_IDS)
        request = generation_pb2.CreateJobRequest(**job(job_id=job_id, **sampling))
        await self.call(channel, "CreateJob", request)
        return job_id

    async def cancel(self, channel: grpc.aio.Channel, *job_ids: str) -> None:
        """Cancels jobs."""
        for job_id in job_ids:
            await self.call(channel, "CancelJob", generation_pb2.CancelJobRequest(job_id=job_id))

    async def repeat(self, num_callers: int, method: str, *requests: bytes | Message) -> None:
        """Callers with a connection each send the requests in turn, until the time is over."""
        ends_at = time.monotonic() + self.seconds

        async def caller() -> None:
            async with self.connect() as channel:
                while time.monotonic() < ends_at:
                    for request in requests:
                        await self.call(channel, method, request)

        await asyncio.gather(*(caller() for _ in range(num_callers)))


def code_of(error: grpc.aio.AioRpcError) -> str:
    """The name of a refusal's code; a RESOURCE_EXHAUSTED that does not say when to try again has one of its own."""
    name: str = error.code().name
    status = rpc_status.from_call(error)
    details = [] if status is None else status.details
    if name == "RESOURCE_EXHAUSTED" and not any(one.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for one in details):
        return "RESOURCE_EXHAUSTED without RetryInfo"
    return name


def job(*, job_id: str = "", prompt_tokens: int = 8, **sampling: Any) -> dict[str, Any]:
    """The fields of a request whose output ends with the context, unless `sampling` says otherwise."""
    params = {"max_new_tokens": 1000 - prompt_tokens, "ignore_eos": True, **sampling}
    ids = generation_pb2.TokenIds(ids=range(10, 10 + prompt_tokens))
    return {"job_id": job_id, "input_ids": ids, "sampling_params": generation_pb2.SamplingParams(**params)}


async def unknown_fields(target: Target) -> None:
    """Eight callers with 3 MiB of unknown fields."""
    requests = hostile_requests(3 * MIB)
    await target.repeat(8, "CreateJob", requests["unknown fields"], requests["unknown fields of messages"])


async def input_ids(target: Target) -> None:
    """Four million token ids, for a context of a thousand."""
    requests = hostile_requests(4_000_000)
    await target.repeat(2, "CreateJob", requests["input_ids"], requests["input_ids, one by one"])


async def long_lists(target: Target) -> None:
    """Lists and maps of hundreds of thousands of entries, where a few are accepted."""
    requests = hostile_requests(4_000_000)
    names = ("messages", "empty messages", "logit_bias", "stop", "stop_token_ids")
    await target.repeat(4, "CreateJob", *(requests[name] for name in names))


async def long_texts(target: Target) -> None:
    """Forty texts of almost 4 MiB at once, for a context of a thousand."""
    text = generation_pb2.CreateJobRequest(text="word " * ((4 * MIB - 1024) // 5))
    await target.repeat(target.number(40), "CreateJob", text)


async def conversations(target: Target) -> None:
    """Eight callers with 4,096 messages each."""
    items = [generation_pb2.ChatMessage(role="user", content="Hello, who are you?")] * 4096
    request = generation_pb2.CreateJobRequest(messages=generation_pb2.ChatMessages(items=items))
    await target.repeat(8, "CreateJob", request)


async def burst(target: Target) -> None:
    """Two thousand calls at once, more than the queue takes."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(target.connect()) for _ in range(8)]
        request = generation_pb2.GenerateRequest(**job(max_new_tokens=16))
        calls = (target.stream(channels[n % 8], "Generate", request) for n in range(target.number(2000)))
        await asyncio.gather(*calls)


async def watchers(target: Target) -> None:
    """A thousand watchers of one job."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(target.connect()) for _ in range(4)]
        job_id = await target.create(channels[0])
        request = generation_pb2.WatchJobRequest(job_id=job_id)
        streams = [
            asyncio.create_task(target.stream(channels[n % 4], "WatchJob", request)) for n in range(target.number(1000))
        ]
        await asyncio.sleep(2 * target.seconds)
        await target.cancel(channels[0], job_id)
        await asyncio.gather(*streams)


async def list_jobs(target: Target) -> None:
    """Four callers list thousands of jobs, a thousand at a time."""
    async with target.connect() as channel:
        ends = []
        for _ in range(target.number(3000)):
            request = generation_pb2.GenerateRequest(**job(job_id=next(_JOB_IDS), max_new_tokens=1))
            ends.append(target.stream(channel, "Generate", request))
        for start in range(0, len(ends), SLOTS):
            await asyncio.gather(*ends[start : start + SLOTS])
    await target.repeat(4, "ListJobs", generation_pb2.ListJobsRequest(page_size=1000))


async def samples_with_stops(target: Target) -> None:
    """A job with 16 samples and as many stop strings as there may be, and ten watchers."""
    async with target.connect() as channel:
        stops = [f"{letter}{'never' * 50}" for letter in "etaoinshrdlucmfw"]
        job_id = await target.create(channel, n=16, stop=stops, temperature=1.0)
        request = generation_pb2.WatchJobRequest(job_id=job_id)
        streams = [asyncio.create_task(target.stream(channel, "WatchJob", request)) for _ in range(10)]
        await asyncio.sleep(target.seconds)
        await target.cancel(channel, job_id)
        await asyncio.gather(*streams)


async def open_streams(target: Target) -> None:
    """Five hundred streams that watch or wait, on two connections, beside 64 busy ones."""
    busy_request = generation_pb2.GenerateRequest(**job())
    async with target.connect() as busy, target.connect() as channel:
        streams = [asyncio.create_task(target.stream(busy, "Generate", busy_request)) for _ in range(SLOTS)]
        await asyncio.sleep(1.0)
        number = target.number(250)
        job_ids = await asyncio.gather(*(target.create(channel) for _ in range(number)))
        for job_id in job_ids:
            request = generation_pb2.WatchJobRequest(job_id=job_id)
            streams.append(asyncio.create_task(target.stream(channel, "WatchJob", request)))
        waiting = [f"{job_id}-waits" for job_id in job_ids]
        for job_id in waiting:
            generate = generation_pb2.GenerateRequest(**job(job_id=job_id))
            streams.append(asyncio.create_task(target.stream(channel, "Generate", generate)))
        await asyncio.sleep(2 * target.seconds)
        await target.cancel(channel, *job_ids, *waiting)
        for stream in streams[:SLOTS]:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def half_messages(target: Target) -> None:
    """Three connections with 431 calls each, which send most of 4 MiB: without a key, with it, and health checks."""
    number = target.number(431)
    kinds = ((f"/{SERVICE}/CreateJob", ()), (f"/{SERVICE}/CreateJob", AUTHORIZATION), (f"/{HEALTH_SERVICE}/Check", ()))
    async with target.connect() as channel:
        request, kind = generation_pb2.GetServerInfoRequest(), generation_pb2.GetServerInfoResponse
        info = await target.call(channel, "GetServerInfo", request, kind)
        process = psutil.Process(next(one.pid for one in info.services if one.name == "gateway"))
        before = process.memory_info().rss
        with ExitStack() as stack:
            sending = []
            for path, metadata in kinds:
                connection = stack.enter_context(HalfMessages(target.address, 4 * MIB - 1024))
                for _ in range(number):
                    connection.call(path, metadata)
                sending.append(asyncio.create_task(asyncio.to_thread(connection.send, 2 * target.seconds)))
            while not all(task.done() for task in sending):
                target.memory_mib = max(target.memory_mib, (process.memory_info().rss - before) / MIB)
                await asyncio.wait(sending, timeout=0.02)
            await asyncio.gather(*sending)
        await target.call(channel, "GetServerInfo", request)


@dataclass(frozen=True, slots=True)
class Probe:
    """A load, and the statuses that its calls may have."""

    run: Callable[[Target], Awaitable[None]]
    codes: frozenset[str]

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.run, "__name__", "")


_INVALID, _OK, _FULL = "INVALID_ARGUMENT", "OK", "RESOURCE_EXHAUSTED"
PROBES = (
    Probe(unknown_fields, frozenset({_INVALID})),
    Probe(input_ids, frozenset({_INVALID})),
    Probe(long_lists, frozenset({_INVALID})),
    Probe(long_texts, frozenset({_INVALID})),
    Probe(conversations, frozenset({_INVALID, _FULL})),
    Probe(burst, frozenset({_OK, _FULL})),
    Probe(watchers, frozenset({_OK})),
    Probe(list_jobs, frozenset({_OK})),
    Probe(samples_with_stops, frozenset({_OK})),
    Probe(open_streams, frozenset({_OK})),
    Probe(half_messages, frozenset({_OK})),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The outcome of a probe."""

    name: str
    codes: dict[str, int]
    stall_ms: float
    """Longest time that the loop was held, of its thread's own time."""
    stall_wall_ms: float
    """By the clock, which counts other processes of the machine, too."""
    num_health_checks: int
    health_p50_ms: float
    health_p99_ms: float
    memory_mib: float
    """That the gateway gained at most; 0 if the probe does not look at it."""
    problems: list[str]
    """Answers that the probe must not get."""

    def shortcomings(self) -> list[str]:
        """Times beyond their limits, which a busy machine may explain."""
        found = []
        if self.stall_ms > MOST_STALL_MS:
            found.append(f"{self.name}: the loop was held for {self.stall_ms:.1f} ms")
        if self.health_p99_ms > MOST_HEALTH_P99_MS:
            found.append(f"{self.name}: health took {self.health_p99_ms:.1f} ms at p99")
        if self.memory_mib > MOST_MEMORY_MIB:
            found.append(f"{self.name}: the gateway took {self.memory_mib:.0f} MiB")
        return found


async def run_probe(probe: Probe, target: Target, stalls: StallFile, health: HealthChecks) -> ProbeReport:
    """Runs a probe to its end."""
    target.codes.clear()
    target.memory_mib = 0.0
    stalls.take()
    health.begin()
    await probe.run(target)
    health_ms, statuses = await asyncio.to_thread(health.end)
    stall = stalls.take()
    cuts = quantiles(health_ms, n=100)
    problems = [f"{probe.name}: {n} x {code}" for code, n in target.codes.items() if code not in probe.codes]
    return ProbeReport(
        name=probe.name,
        codes=dict(target.codes),
        stall_ms=round(stall.cpu_ms, 2),
        stall_wall_ms=round(stall.wall_ms, 2),
        num_health_checks=len(health_ms),
        health_p50_ms=round(cuts[49], 2),
        health_p99_ms=round(cuts[98], 2),
        memory_mib=round(target.memory_mib, 1),
        problems=[*problems, *(f"{probe.name}: health {status}" for status in sorted(statuses - {"SERVING"}))],
    )


def write_key(directory: Path) -> Path:
    """Writes a file with the key of the probes' calls."""
    path = directory / "keys"
    path.write_text(f"probes:{KEY}\n")
    path.chmod(0o600)
    return path


async def run_probes(stack: Stack, names: Names, seconds: float) -> AsyncIterator[ProbeReport]:
    """Starts the services, and runs the probes of these names."""
    await stack.dummies(*KERNELS_MS)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "stalls"
        stalls = StallFile(path)
        options: dict[str, Any] = {
            "api_keys": write_key(Path(directory)),
            "slots": SLOTS,
            "queue": QUEUE,
            "kept_jobs": KEPT_JOBS,
            "context_tokens": 1024,
        }
        async with stack.scheduler("draft", gateway_program=watched_gateway(path), **options) as served:
            with health_checks(served.address) as health:
                for probe in PROBES:
                    if probe.name in names:
                        yield await run_probe(probe, Target(served.address, seconds), stalls, health)


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The settings of a run."""

    seconds: float = setting(5.0, help="How long each probe goes on.", low=1, high=3600)
    probe: Names = Names.of([probe.name for probe in PROBES])


@benchmark(Plan)
def main(plan: Plan, file: Path | None) -> list[str]:
    """Probes a gateway."""
    reports = asyncio.run(_probe(plan.probe, plan.seconds))
    problems = [text for report in reports for text in (*report.problems, *report.shortcomings())]
    probes = [asdict(report) for report in reports]
    write_json({"host": host(), "seconds": plan.seconds, "probes": probes, "problems": problems}, file)
    return problems


async def _probe(names: Names, seconds: float) -> list[ProbeReport]:
    reports = []
    print(f"{'probe':20} {'stall':>8} {'wall':>8} {'health p50':>11} {'p99':>8} {'MiB':>6}  answers")
    async with Stack(LOG_DIR / "probes") as stack:
        async for one in run_probes(stack, names, seconds):
            reports.append(one)
            times = f"{one.stall_ms:8.1f} {one.stall_wall_ms:8.1f} {one.health_p50_ms:11.1f} {one.health_p99_ms:8.1f}"
            print(f"{one.name:20} {times} {one.memory_mib:6.0f}  {one.codes}", flush=True)
    return reports


if __name__ == "__main__":
    main()
