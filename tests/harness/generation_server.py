"""A server of jobs for tests: the real gateway on a real connection, with a scripted scheduler behind it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client import CollectorRegistry

from slipstream.client import AsyncClient
from slipstream.common.errors import SlipstreamError
from slipstream.common.wire.job import JobInfo, JobState, OutputChunk, TokenLogprobs
from slipstream.common.wire.server import SchedulerDescription, ServerState, ServiceState
from slipstream.gateway import vllm
from slipstream.gateway.config import Shard
from slipstream.gateway.constraints import GrammarCompiler
from slipstream.gateway.job import JobStore
from slipstream.gateway.jobs import JobManager
from slipstream.gateway.journal_file import JournalFile, JournalMode
from slipstream.gateway.metrics import RequestMetrics
from slipstream.gateway.model import ServedModel
from slipstream.gateway.peers import GatewayState, Peers
from slipstream.gateway.request import RequestLimits
from slipstream.gateway.scheduler import SchedulerLink, watch_pages
from slipstream.gateway.service import RECORDER, SERVICE_NAME, GenerationServicer, RecorderServicer
from slipstream.gateway.stream import StreamWrites
from slipstream.gateway.tokenize_queue import TokenizeQueue
from slipstream.gateway.vllm import VllmEngineServicer
from slipstream.protos import generation_pb2_grpc, trace_pb2_grpc
from tests.harness.example_states import CONTEXT_TOKENS, STATE, TOKENS_PER_STEP
from tests.harness.grpc_server import FREE_PORT, running_server
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler, serving
from tests.harness.tokenizers_by_kind import make_tokenizer

TTL_S = 600.0


@dataclass(slots=True, kw_only=True)
class GenerationServer:
    """A running generation server, with the parts that a test looks at and changes."""

    address: str
    manager: JobManager
    store: JobStore
    link: SchedulerLink
    loop: ScriptedScheduler
    model: ServedModel
    registry: CollectorRegistry
    absence: SlipstreamError | None = None
    """Why there is nothing to serve, if so."""
    is_serving: bool = True
    """What health checks say."""

    def model_now(self) -> ServedModel:
        """Returns the model that requests are checked with. Raises `absence`."""
        if self.absence is not None:
            raise self.absence
        return self.model

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 if there is none."""
        return self.registry.get_sample_value(f"slipstream_{name}", labels) or 0.0


def model_of(
    description: SchedulerDescription, kind: str = "byte level", *, tokenizer_path: str = "/models/tiny"
) -> ServedModel:
    """The model of a description, with a tokenizer of `kind`; `tokenizer_path` is only what it says of itself."""
    server = description.server
    limits = RequestLimits(
        vocab_size=server.vocab_size,
        context_tokens=server.context_tokens,
        eos_token_ids=frozenset(description.eos_token_ids),
        num_draft_tokens=description.most_draft_tokens,
        has_constraints=description.constraints,
    )
    return ServedModel(make_tokenizer(kind), limits, tokenizer_path=tokenizer_path, identity=server.model)


@asynccontextmanager
async def generation_server(
    *,
    kind: str = "byte level",
    capacity: int = 1000,
    slots: int = 64,
    address: str = FREE_PORT,
    context_tokens: int = CONTEXT_TOKENS,
    kept_jobs: int = 1000,
    read_timeout_s: float = 60.0,
    outage_timeout_s: float = 60.0,
    stream_interval_s: float = 0.0,
    tokenizer_path: str = "/models/tiny",
    clock: Callable[[], float] = time.monotonic,
    interceptors: tuple[Any, ...] = (),
    message_interceptors: tuple[Any, ...] = (),
    key_tokens: int | None = None,
    journal: Path | None = None,
    return_s: float = 30.0,
    scheduler: ScriptedScheduler | None = None,
    waits: bool = True,
    logs_requests: bool = False,
) -> AsyncIterator[GenerationServer]:
    """Serves a model with a tokenizer of `kind`. If it `waits`, it is linked to its scheduler from the beginning on."""
    description = replace(DESCRIPTION, server=replace(STATE, context_tokens=context_tokens))
    scheduler = scheduler or ScriptedScheduler(description, slots=slots)
    registry, is_linked = CollectorRegistry(), asyncio.Event()
    with (
        TemporaryDirectory() as directory,
        ThreadPoolExecutor(1) as executor,
        ThreadPoolExecutor(1) as compiling,
        serving(scheduler, directory) as behind,
    ):
        metrics = RequestMetrics(registry, num_running=lambda: link.num_running, num_waiting=lambda: link.num_waiting)
        link = SchedulerLink(
            behind,
            lambda described, last: (
                last
                if last and last.identity == described.server.model
                else model_of(described, kind, tokenizer_path=tokenizer_path)
            ),
            capacity=capacity,
            outage_timeout_s=outage_timeout_s,
            on_serving=lambda is_serving: is_linked.set() if is_serving else None,
            on_given_up=metrics.given_up.inc,
        )
        store = JobStore(capacity=kept_jobs, ttl_s=TTL_S, clock=clock)
        manager = JobManager(
            link,
            store,
            metrics,
            stream_interval_s=lambda: stream_interval_s,
            journal_file=journal and JournalFile.open(journal, JournalMode.PROCESS),
            return_s=return_s,
            key_tokens=key_tokens,
            logs_requests=logs_requests,
        )
        linked = asyncio.create_task(link.run(manager))
        if waits:
            await asyncio.wait_for(is_linked.wait(), 30)

        async def state() -> ServerState:
            return (await link.describe()).server

        grammars = GrammarCompiler(TokenizeQueue(compiling, num_threads=1), metrics)
        service = ServiceState(name="gateway", address=address, pid=1)
        servicer = GenerationServicer(
            manager,
            peers=Peers(Shard(), (), manager, lambda: GatewayState(service)),
            model=lambda: served.model_now(),
            state=state,
            turns=TokenizeQueue(executor),
            grammars=grammars,
            writes=StreamWrites(read_timeout_s, metrics.cut_off.inc),
        )
        engine = VllmEngineServicer(
            servicer,
            manager,
            model=lambda: served.model_now(),
            state=state,
            is_serving=lambda: served.is_serving,
            watch_pages=partial(watch_pages, behind),
        )
        services = (
            (SERVICE_NAME, generation_pb2_grpc.add_GenerationServicer_to_server, servicer),
            (vllm.SERVICE_NAME, vllm.add_to_server, engine),
            (RECORDER, trace_pb2_grpc.add_RecorderServicer_to_server, RecorderServicer(servicer.request_times)),
        )
        async with running_server(
            *services, address=address, interceptors=interceptors, message_interceptors=message_interceptors
        ) as server:
            served = GenerationServer(
                address=server.address,
                manager=manager,
                store=store,
                link=link,
                loop=scheduler,
                model=link.model() if waits else model_of(description, kind),
                registry=registry,
            )
            yield served
        linked.cancel()
        with suppress(asyncio.CancelledError):
            await linked
        await manager.journal.close()
        grammars.close()


async def collect(chunks: AsyncIterable[OutputChunk]) -> list[OutputChunk]:
    """Everything that comes."""
    return [chunk async for chunk in chunks]


def tokens_of(chunks: list[OutputChunk]) -> list[int]:
    """The tokens of a job."""
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs_in(chunks: list[OutputChunk]) -> list[TokenLogprobs]:
    """The logprobs of a job, without the bytes of the tokens."""
    return [TokenLogprobs(one.logprob, one.top) for chunk in chunks for one in chunk.logprobs]


def text_of(chunks: list[OutputChunk]) -> str:
    """The text of a job."""
    return "".join(chunk.text for chunk in chunks)


async def state_of(client: AsyncClient, job_id: str, state: JobState) -> JobInfo:
    """Waits until a job has come to a state."""
    async with asyncio.timeout(30):
        while (info := await client.get_job(job_id)).state is not state:
            pass
    return info


def make_version_1(path: Path) -> None:
    """Makes a journal one of the first format, which had no checksums."""
    with closing(sqlite3.connect(path)) as database:
        for table in ("jobs", "outputs", "steps"):
            database.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
        database.execute("DROP TABLE last_jobs")
        database.execute("PRAGMA user_version = 1")


def killed(path: Path) -> Path:
    """The journal as a kill at this moment leaves it."""
    left = path.with_name(f"{path.stem}-left.sqlite3")
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{path}{suffix}", f"{left}{suffix}")
    return left


async def serve_held() -> None:
    """Prints the address of a server whose samples get one step's tokens each, and serves until its input ends."""
    async with generation_server() as server:
        server.loop.pause_tokens = TOKENS_PER_STEP
        print(server.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve_held())
