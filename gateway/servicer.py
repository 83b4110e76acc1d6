"""The `Generation` service: decodes what clients say, asks the desk, encodes what it answers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import InvalidArgumentError, ResourceExhaustedError
from slipstream.common.rpc.unknown_fields import reject_unknown_fields
from slipstream.gateway.detokenizer import Vocabulary
from slipstream.gateway.prompt import check_num_messages
from slipstream.gateway.validation import check_job_id, digest_of, parse_request
from slipstream.gateway.write_watch import WriteWatch
from slipstream.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from concurrent.futures import Executor

    from slipstream.common.api.output_chunk import OutputChunk
    from slipstream.common.api.server_state import ServerState
    from slipstream.gateway.checked_request import CheckedRequest
    from slipstream.gateway.job import Job
    from slipstream.gateway.manager import JobManager
    from slipstream.gateway.prompt import JobRequest
    from slipstream.gateway.validation import RequestLimits

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name

LONG_TEXT_CHARACTERS = 4096
"""About a millisecond of tokenising, in which the event loop serves nobody else."""


class ServedModel:
    """What a request is checked and its output is spelled with. Another model, another one of these."""

    def __init__(self, tokenizer: Any, limits: RequestLimits) -> None:
        """`tokenizer`: as `load_tokenizer` returns it."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.vocabulary = Vocabulary(tokenizer)


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Serves clients. Errors are exceptions, which the interceptor turns into statuses."""

    def __init__(
        self,
        desk: JobManager,
        *,
        model: Callable[[], ServedModel],
        state: Callable[[], ServerState],
        executor: Executor,
        read_timeout_s: float,
    ) -> None:
        """`model` and `state` tell what is so now, and may raise UnavailableError; `executor` tokenises long texts.

        A stream is cut off when its client reads nothing for `read_timeout_s`.
        """
        self._desk = desk
        self._model = model
        self._state = state
        self._executor = executor
        self._read_timeout_s = read_timeout_s

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        """See generation.proto."""
        kept = await self._admit(request)
        self._desk.enter(kept)
        try:
            await self._send(context, self._desk.watch(kept, timeout_s=context.time_remaining()))
        finally:
            self._desk.leave(kept, context.time_remaining())

    async def CreateJob(
        self, request: generation_pb2.CreateJobRequest, context: Any
    ) -> generation_pb2.CreateJobResponse:
        """See generation.proto."""
        kept = await self._admit(request)
        kept.is_detached = True
        return generation_pb2.CreateJobResponse(job=kept.info().to_pb())

    async def WatchJob(self, request: generation_pb2.WatchJobRequest, context: Any) -> None:
        """See generation.proto."""
        kept = self._named(request)
        if request.from_token and request.from_tokens:
            given = f"{len(request.from_tokens)} numbers"
            raise InvalidArgumentError("from_tokens", given, "none where from_token is given")
        field, offsets = "from_token", [request.from_token]
        if request.from_tokens:
            field, offsets = "from_tokens", list(request.from_tokens)
        await self._send(context, self._desk.watch(kept, offsets, field=field, timeout_s=context.time_remaining()))

    async def GetJob(self, request: generation_pb2.GetJobRequest, context: Any) -> generation_pb2.GetJobResponse:
        """See generation.proto."""
        return generation_pb2.GetJobResponse(job=self._named(request).info().to_pb())

    async def ListJobs(self, request: generation_pb2.ListJobsRequest, context: Any) -> generation_pb2.ListJobsResponse:
        """See generation.proto."""
        reject_unknown_fields(request)
        return self._desk.page(request.page_size, request.page_token).to_pb()

    async def CancelJob(
        self, request: generation_pb2.CancelJobRequest, context: Any
    ) -> generation_pb2.CancelJobResponse:
        """See generation.proto."""
        reject_unknown_fields(request)
        check_job_id(request.job_id)
        self._desk.cancel(request.job_id)
        return generation_pb2.CancelJobResponse()

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: Any
    ) -> generation_pb2.GetServerInfoResponse:
        """See generation.proto."""
        reject_unknown_fields(request)
        return self._state().to_pb()

    def _named(self, request: generation_pb2.WatchJobRequest | generation_pb2.GetJobRequest) -> Job:
        reject_unknown_fields(request)
        check_job_id(request.job_id)
        return self._desk.get(request.job_id)

    async def _admit(self, request: JobRequest) -> Job:
        # A request that comes again needs no model, nor room in the queue.
        check_num_messages(request)
        reject_unknown_fields(request)
        kept = self._desk.find(request.job_id, digest_of(request)) if request.job_id else None
        if kept is not None:
            return kept
        while True:
            model = self._present_model()
            # Before the text is tokenised: under overload most requests come no further.
            self._desk.check_room()
            checked = await self._parse(request, model)
            # Other workers may have come meanwhile, for which it may be too long, or its tokens mean something else.
            if self._present_model() is model:
                return self._desk.create(checked, model.vocabulary.new_detokenizer)

    def _present_model(self) -> ServedModel:
        with self._desk.counting_refusals():
            return self._model()

    async def _parse(self, request: JobRequest, model: ServedModel) -> CheckedRequest:
        # What a model's chat template takes, nobody knows.
        if len(request.text) <= LONG_TEXT_CHARACTERS and not request.HasField("messages"):
            return parse_request(request, model.limits, model.tokenizer)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, parse_request, request, model.limits, model.tokenizer)

    async def _send(self, context: Any, chunks: AsyncGenerator[OutputChunk, None]) -> None:
        """Sends a stream, and gives up on a client that reads nothing: gRPC holds a few MiB of it by then."""
        timeout = asyncio.timeout(None)
        try:
            async with timeout, aclosing(chunks):
                with WriteWatch(timeout, self._read_timeout_s) as watch:
                    async for chunk in chunks:
                        watch.begin()
                        await context.write(chunk.to_pb())
                        watch.end()
        except TimeoutError:
            if not timeout.expired():
                raise
            self._desk.cut_off()
            message = f"the client read nothing for {self._read_timeout_s:g} s"
            raise ResourceExhaustedError(message, retry_after_ms=0) from None
