"""The scheduler's clients' side, served over a real connection, with a fake loop behind it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from slipstream.common.api.server_state import ServerState, ServiceState
from slipstream.gateway.manager import JobManager, JobStore
from slipstream.gateway.request_metrics import RequestMetrics
from slipstream.gateway.servicer import SERVICE_NAME, GenerationServicer, ServedModel
from slipstream.gateway.validation import RequestLimits
from slipstream.protos import generation_pb2_grpc
from slipstream.scheduler.core.waiting_queue import WaitingQueue
from tests.harness.fake_loop import TOKENS_PER_STEP, FakeLoop
from tests.harness.grpc_server import FREE_PORT, running_server
from tests.harness.tokenizers_by_kind import make_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from slipstream.common.errors import SlipstreamError

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
    """What a test looks at and changes."""

    address: str
    desk: JobManager
    store: JobStore
    queue: WaitingQueue
    loop: FakeLoop
    model: ServedModel
    registry: CollectorRegistry
    absence: SlipstreamError | None = None
    """Why there is nothing to serve, if so."""

    def model_now(self) -> ServedModel:
        """What a request is checked with. Raises `absence`."""
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
    desk = JobManager(queue, store, metrics)
    loop = FakeLoop(queue, desk, asyncio.get_running_loop(), slots=slots)
    with ThreadPoolExecutor(1) as executor, loop:
        servicer = GenerationServicer(
            desk,
            model=lambda: served.model_now(),
            state=lambda: STATE,
            executor=executor,
            read_timeout_s=read_timeout_s,
        )
        add = generation_pb2_grpc.add_GenerationServicer_to_server
        async with running_server((SERVICE_NAME, add, servicer), address=address) as server:
            served = GenerationServer(
                address=server.address,
                desk=desk,
                store=store,
                queue=queue,
                loop=loop,
                model=model,
                registry=registry,
            )
            yield served
