"""The grammar worker as a process. It has no model, no torch, and no device."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLExecutor

from slipstream.common.errors import FailedPreconditionError, InvalidArgumentError, MismatchError, StaleEpochError
from slipstream.common.grammars import MAX_COMPILE_STACK_BYTES
from slipstream.common.rpc.metrics import RpcMetrics, make_registry, serve_metrics
from slipstream.common.rpc.serving import GrpcServer
from slipstream.common.rpc.shutdown import ShutdownSignals
from slipstream.common.wire.events import StreamName, make_log_directory, open_event_log
from slipstream.common.wire.step import GRAMMAR_PROTOCOL_VERSION, Role
from slipstream.protos import worker_pb2 as pb
from slipstream.protos import worker_pb2_grpc as pb_grpc
from slipstream.services.grammar.epoch import GrammarEpoch
from slipstream.services.grammar.matchers import MOST_KEPT, Grammars, load_tokenizer
from slipstream.services.grammar.metrics import MASK_SECONDS, MASKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from grpc.aio import ServicerContext
    from prometheus_client import CollectorRegistry

    from slipstream.common.rpc.listener import Listener
    from slipstream.common.wire.events import EventLog
    from slipstream.services.grammar.config import GrammarConfig

logger = logging.getLogger(__name__)

MAX_RECEIVE_BYTES = 64 * 2**20
"""Most bytes of a command: it may have many sequences with their outputs."""
STOP_GRACE_S = 0.2
MOST_THREADS = 4
"""Threads that fill masks, unless settings say so: 25 took 11 ms for 64 sequences that one can do in 4 ms."""


async def run_grammar_worker(config: GrammarConfig, listener: Listener, metrics_port: int, metrics_host: str) -> int:
    """Serves until a signal; returns the exit status."""
    # Of this process's threads: the library follows rules that refer to one another by recursion.
    threading.stack_size(4 * MAX_COMPILE_STACK_BYTES)
    registry = make_registry()
    with ExitStack() as held:
        signals = held.enter_context(ShutdownSignals())
        port = held.enter_context(serve_metrics(registry, metrics_port, metrics_host))
        make_log_directory(config.access_log_dir)
        log = open_event_log(config.access_log_dir, StreamName.GRAMMAR, os.getpid())
        held.callback(log.close)
        num_threads = config.mask_threads or max(1, min(len(os.sched_getaffinity(0)) // 4, MOST_THREADS))
        servicer = GrammarServicer(LLExecutor(num_threads), registry, port, log)
        held.callback(servicer.close)
        server = GrpcServer(listener, metrics=RpcMetrics(registry), max_receive_bytes=MAX_RECEIVE_BYTES)
        server.add_service("slipstream.v1.Worker", pb_grpc.add_WorkerServicer_to_server, servicer)
        await server.start()
        server.set_serving(True)
        logger.info("serving llguidance %s at %s", version("llguidance"), server.address)
        await signals.wait()
        await server.stop(STOP_GRACE_S)
    return 0


_Outgoing = asyncio.Queue[pb.StepAck | Exception | None]
"""What is to be sent on an Execute stream: its end is an error, or None."""


class GrammarServicer(pb_grpc.WorkerServicer):
    """Serves `Worker`, for one scheduler and one attachment at a time. Belongs to the event loop."""

    def __init__(self, executor: LLExecutor, registry: CollectorRegistry, metrics_port: int, log: EventLog) -> None:
        self._executor = executor
        self._log = log
        self._masks, self._mask_seconds = MASKS.counter(registry), MASK_SECONDS.counter(registry)
        self._metrics_port = metrics_port
        self._grammars: tuple[tuple[Any, ...], Grammars] | None = None
        """The tokenizer that was loaded, as its path, size and ends tell it from others, and grammars for it."""
        self._epoch: GrammarEpoch | None = None
        self._last_epoch = 0
        self._has_stream = False
        self._outgoing = _Outgoing()
        self._attaching = asyncio.Lock()
        """Held by an Attach: while it loads a tokenizer, another one could arrive."""

    async def Describe(self, request: pb.DescribeRequest, context: ServicerContext) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            role=Role.GRAMMAR.value,
            protocol_version=GRAMMAR_PROTOCOL_VERSION,
            device="cpu",
            model=f"llguidance {version('llguidance')}",
            pid=os.getpid(),
            metrics_port=self._metrics_port,
            last_epoch=self._last_epoch,
            has_scheduler=self._has_stream,
        )

    async def Attach(self, request: pb.AttachRequest, context: ServicerContext) -> pb.AttachResponse:
        async with self._attaching:
            await self._attach(request)
        return pb.AttachResponse()

    async def _attach(self, request: pb.AttachRequest) -> None:
        if self._has_stream:
            raise FailedPreconditionError("another scheduler has the Execute stream of this worker")
        if (given := request.protocol_version) != GRAMMAR_PROTOCOL_VERSION:
            ours = GRAMMAR_PROTOCOL_VERSION
            raise MismatchError([f"protocol version: scheduler has {given}, this worker has {ours}"])
        if request.pid not in (0, os.getpid()):
            raise FailedPreconditionError(f"process {request.pid} is meant, and this is process {os.getpid()}")
        if request.epoch <= self._last_epoch:
            raise StaleEpochError(f"epoch {request.epoch}: this worker was attached to {self._last_epoch} before")
        # An attachment without a stream lost its scheduler between Attach and Execute.
        self.close()
        grammars = await self._grammars_for(request.peer)
        grammars.most_kept = MOST_KEPT + request.num_slots
        loop = asyncio.get_running_loop()
        outgoing = self._outgoing = _Outgoing()

        def fail(error: Exception) -> None:
            loop.call_soon_threadsafe(outgoing.put_nowait, error)

        self._epoch = GrammarEpoch(request, grammars, self._executor, fail, self._filled, log=self._log)
        self._last_epoch = request.epoch

    async def Prepare(self, request: pb.PrepareRequest, context: ServicerContext) -> pb.PrepareResponse:
        if self._grammars is None:
            raise FailedPreconditionError("not attached")
        await asyncio.to_thread(self._grammars[1].compile, request.grammar)
        return pb.PrepareResponse()

    async def Execute(
        self, requests: AsyncIterator[pb.StepCommand], context: ServicerContext
    ) -> AsyncIterator[pb.StepAck]:
        """See worker.proto. The end of the stream ends the attachment."""
        epoch = self._epoch
        if epoch is None or self._has_stream:
            raise FailedPreconditionError("not attached, or another scheduler has the Execute stream")
        self._has_stream, outgoing = True, self._outgoing
        reading = asyncio.create_task(self._read(epoch, requests, outgoing))
        try:
            while (sent := await outgoing.get()) is not None:
                if isinstance(sent, Exception):
                    raise sent
                yield sent
        finally:
            reading.cancel()
            self._has_stream = False
            if self._epoch is epoch:
                self.close()

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.DrainResponse:
        epoch = self._epoch
        if epoch is not None and request.epoch in (0, epoch.number):
            self._epoch = None
            try:
                await asyncio.to_thread(epoch.finish)
            finally:
                epoch.abandon()  # the rest, if the caller is gone: what it waits for may never happen
        return pb.DrainResponse()

    def close(self) -> None:
        """Ends the attachment, if there is one. Its thread ends with its step at the latest."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.abandon()

    def _filled(self, num_masks: int, seconds: float) -> None:
        self._masks.inc(num_masks)
        self._mask_seconds.inc(seconds)

    async def _grammars_for(self, verify: pb.DescribeResponse) -> Grammars:
        key = verify.tokenizer_path, verify.tokenizer_sha256, verify.vocab_size, tuple(verify.eos_token_ids)
        if self._grammars is None or self._grammars[0] != key:
            path = Path(verify.tokenizer_path)
            tokenizer = await asyncio.to_thread(load_tokenizer, path, verify.vocab_size, verify.eos_token_ids)
            self._grammars = key, Grammars(tokenizer)
        return self._grammars[1]

    async def _read(
        self,
        epoch: GrammarEpoch,
        requests: AsyncIterator[pb.StepCommand],
        outgoing: _Outgoing,
    ) -> None:
        try:
            async for command in requests:
                if command.epoch != epoch.number:
                    raise InvalidArgumentError("epoch", command.epoch, str(epoch.number))
                epoch.enqueue(command)
                if command.acknowledge:
                    outgoing.put_nowait(pb.StepAck(epoch=command.epoch, step=command.step))
        except Exception as error:
            outgoing.put_nowait(error)
        else:
            outgoing.put_nowait(None)
