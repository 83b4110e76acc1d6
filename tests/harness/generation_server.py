"""A server of jobs for tests: the real gateway on a real connection, with a fake scheduler loop behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from slipstream.common.api.output_chunk import FinishReason, TokenLogprobs
from slipstream.common.api.sequence import SequenceOutput
from slipstream.common.api.server_state import ServerState, ServiceState
from slipstream.gateway.fair_turns import FairTurns
from slipstream.gateway.manager import JobManager, JobStore
from slipstream.gateway.request_metrics import RequestMetrics
from slipstream.gateway.servicer import SERVICE_NAME, GenerationServicer, ServedModel
from slipstream.gateway.validation import RequestLimits
from slipstream.protos import generation_pb2_grpc
from slipstream.scheduler.core.waiting_queue import WaitingQueue
from tests.harness.grpc_server import FREE_PORT, running_server
from tests.harness.tokenizers_by_kind import make_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable
    from types import TracebackType

    from slipstream.client import AsyncClient
    from slipstream.common.api.job_info import JobInfo, JobState
    from slipstream.common.api.output_chunk import OutputChunk
    from slipstream.common.errors import SlipstreamError
    from slipstream.scheduler.core.sequence import Sequence


TOKENS_PER_STEP = 3


class FakeLoop:
    """Takes jobs from a queue and delivers tokens to a manager, every job's in one batch a step.

    A job's k-th token is the k-th of its prompt, from the beginning again at its end. The last token of a step is the
    target's own, those before it were drafted.
    """

    def __init__(
        self, queue: WaitingQueue, manager: JobManager, loop: asyncio.AbstractEventLoop, *, slots: int = 64
    ) -> None:
        self.may_step = threading.Event()
        self.may_step.set()
        self.pause_tokens: int | None = None
        """A job that has as many tokens gets no more."""
        self.error: SlipstreamError | None = None
        """Ends every running job at the next step."""
        self.slots = slots
        self.running: list[Sequence] = []
        self.cancelled: list[Sequence] = []
        self._queue = queue
        self._manager = manager
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="fake loop")

    def __enter__(self) -> FakeLoop:
        self._queue.open()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._queue.stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._queue.is_stopped:
            outputs = [(job, SequenceOutput(finish_reason=FinishReason.ABORT)) for job in self._queue.take_cancelled()]
            for job, _ in outputs:
                self.cancelled.append(job)
                if job in self.running:
                    self.running.remove(job)
            while job := self._queue.take_next(lambda _: len(self.running) < self.slots):
                job.stats.admitted_at = time.monotonic()
                job.stats.accepted_per_position = [0] * (TOKENS_PER_STEP - 1)
                self.running.append(job)
            if self.may_step.is_set():
                outputs += [(job, self._step(job)) for job in tuple(self.running) if not self._is_paused(job)]
            if outputs:
                bundle = {job: [progress] for job, progress in outputs}
                self._loop.call_soon_threadsafe(self._manager.deliver, bundle)
            if not outputs:
                self._queue.wait_for_change(0.002 if self.running else 0.5)

    def _is_paused(self, job: Sequence) -> bool:
        return self.pause_tokens is not None and job.stats.num_output_tokens >= self.pause_tokens

    def _step(self, job: Sequence) -> SequenceOutput:
        if self.error is not None:
            self.running.remove(job)
            return SequenceOutput(error=self.error)
        counts, spec = job.stats, job.spec
        start = counts.num_output_tokens
        tokens = [spec.prompt[(start + number) % len(spec.prompt)] for number in range(TOKENS_PER_STEP)]
        tokens = tokens[: spec.max_new_tokens - start]
        reason = FinishReason.LENGTH if start + len(tokens) == spec.max_new_tokens else None
        for number, token in enumerate(tokens):
            if token in spec.stop_token_ids:
                tokens, reason = tokens[: number + 1], FinishReason.STOP
                break
        counts.last_token_at = time.monotonic()
        counts.first_token_at = counts.first_token_at or counts.last_token_at
        counts.num_output_tokens += len(tokens)
        counts.add_draft(TOKENS_PER_STEP - 1, TOKENS_PER_STEP - 1)
        if reason is not None:
            counts.finished_at = time.monotonic()
            self.running.remove(job)
        num_draft = min(TOKENS_PER_STEP - 1, len(tokens))
        logprobs = () if spec.top_logprobs is None else tuple(logprobs_of(token, spec.top_logprobs) for token in tokens)
        return SequenceOutput(token_ids=tuple(tokens), num_draft=num_draft, logprobs=logprobs, finish_reason=reason)


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """A token's, made up."""
    return TokenLogprobs(-token / 2, tuple((token + number, -number / 4) for number in range(num_top)))


VOCAB_SIZE = 350
CONTEXT_TOKENS = 4096
EOS_ID = 1
TTL_S = 600.0

STATE = ServerState(
    version="1.2.3",
    model="tiny",
    vocab_size=VOCAB_SIZE,
    context_tokens=CONTEXT_TOKENS,
    algorithm="standalone",
    num_draft_tokens=4,
    run_ahead=1,
    num_slots=16,
    page_tokens=16,
    num_pages=100,
    num_free_pages=99,
    queue_capacity=8,
    num_waiting=1,
    num_running=2,
    epoch=2**40,
    services=(
        ServiceState(name="scheduler", address="127.0.0.1:1", pid=10, metrics_port=11),
        ServiceState(name="verify", address="unix:/a", pid=12, model="tiny", device="cpu"),
    ),
    fence="host",
)


@dataclass(slots=True, kw_only=True)
class GenerationServer:
    """A running generation server, with the parts that a test looks at and changes."""

    address: str
    manager: JobManager
    store: JobStore
    queue: WaitingQueue
    loop: FakeLoop
    model: ServedModel
    registry: CollectorRegistry
    absence: SlipstreamError | None = None
    """Why there is nothing to serve, if so."""

    def model_now(self) -> ServedModel:
        """Returns the model that requests are checked with. Raises `absence`."""
        if self.absence is not None:
            raise self.absence
        return self.model

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 if there is none."""
        return self.registry.get_sample_value(f"slipstream_{name}", labels) or 0.0


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
    clock: Callable[[], float] = time.monotonic,
    interceptors: tuple[Any, ...] = (),
) -> AsyncIterator[GenerationServer]:
    """Serves a model with a tokenizer of `kind`."""
    limits = RequestLimits(
        vocab_size=VOCAB_SIZE,
        context_tokens=context_tokens,
        eos_token_ids=frozenset({EOS_ID}),
        num_draft_tokens=TOKENS_PER_STEP - 1,
    )
    model = ServedModel(make_tokenizer(kind), limits)
    queue, registry = WaitingQueue(capacity), CollectorRegistry()
    metrics = RequestMetrics(registry, num_running=lambda: len(loop.running), num_waiting=lambda: len(queue))
    store = JobStore(capacity=kept_jobs, ttl_s=TTL_S, clock=clock)
    manager = JobManager(queue, store, metrics)
    loop = FakeLoop(queue, manager, asyncio.get_running_loop(), slots=slots)
    with ThreadPoolExecutor(1) as executor, loop:
        servicer = GenerationServicer(
            manager,
            model=lambda: served.model_now(),
            state=lambda: STATE,
            turns=FairTurns(executor),
            read_timeout_s=read_timeout_s,
        )
        add = generation_pb2_grpc.add_GenerationServicer_to_server
        services = ((SERVICE_NAME, add, servicer),)
        async with running_server(*services, address=address, interceptors=interceptors) as server:
            served = GenerationServer(
                address=server.address,
                manager=manager,
                store=store,
                queue=queue,
                loop=loop,
                model=model,
                registry=registry,
            )
            yield served


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
