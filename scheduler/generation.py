"""The `Generation` service: decodes what clients say, asks the desk, encodes what it answers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from slipstream.common.unknown_fields import reject_unknown_fields
from slipstream.protos import generation_pb2, generation_pb2_grpc
from slipstream.scheduler.detokenizer import Vocabulary
from slipstream.scheduler.validation import check_job_id, parse_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from concurrent.futures import Executor

    from slipstream.common.server_state import ServerState
    from slipstream.scheduler.front_desk import FrontDesk
    from slipstream.scheduler.jobs import JobSpec
    from slipstream.scheduler.validation import RequestLimits

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name

LONG_TEXT_CHARACTERS = 4096
"""About a millisecond of tokenising, in which the event loop serves nobody else."""


class ServedModel:
    """What a request is checked and its output is spelled with. Another model, another one of these."""

    def __init__(self, tokenizer: Any, limits: RequestLimits) -> None:
        """`tokenizer`: as `transformers` loads it."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.vocabulary = Vocabulary(tokenizer)
        # The first call may change the tokenizer's settings, which no two threads may be in the middle of.
        tokenizer.encode("a")


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Serves clients. Errors are exceptions, which the interceptor turns into statuses."""

    def __init__(
        self,
        desk: FrontDesk,
        *,
        model: Callable[[], ServedModel],
        state: Callable[[], ServerState],
        executor: Executor,
    ) -> None:
        """`model` and `state` tell what is so now, and may raise UnavailableError; `executor` tokenises long texts."""
        self._desk = desk
        self._model = model
        self._state = state
        self._executor = executor

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """See generation.proto."""
        model = self._model()
        spec = await self._parse(request, model)
        async with aclosing(self._desk.run(spec, model.vocabulary.new_detokenizer())) as chunks:
            async for chunk in chunks:
                yield chunk.to_pb()

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

    async def _parse(self, request: generation_pb2.GenerateRequest, model: ServedModel) -> JobSpec:
        if len(request.text) <= LONG_TEXT_CHARACTERS:
            return parse_request(request, model.limits, model.tokenizer)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, parse_request, request, model.limits, model.tokenizer)
