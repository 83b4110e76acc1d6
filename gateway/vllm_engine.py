"""The service `vllm.grpc.engine.VllmEngine`, by which the SMG gateway serves the clients of OpenAI's interface."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from slipstream.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.gateway.keys import client_of
from slipstream.gateway.request import check_most
from slipstream.gateway.vllm_messages import VllmAnswer, naming_their_fields, request_from_vllm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from slipstream.common.wire.server import ServerState
    from slipstream.gateway.jobs import JobManager
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.service import GenerationServicer

SERVICE_NAME = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
add_to_server = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server

MAX_ABORTED = 4096
"""Requests that one call may abort: a few milliseconds of the event loop's time."""


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Serves a gateway for OpenAI's interface. Calls that it does not have are UNIMPLEMENTED.

    A request is a job whose id is the request's.
    """

    def __init__(
        self,
        generation: GenerationServicer,
        jobs: JobManager,
        *,
        model: Callable[[], ServedModel],
        state: Callable[[], Awaitable[ServerState]],
        is_serving: Callable[[], bool],
    ) -> None:
        """`model` and `state` as for `GenerationServicer`; `is_serving` says what health checks say."""
        self._generation = generation
        self._jobs = jobs
        self._model = model
        self._state = state
        self._is_serving = is_serving
        self._started_at = time.monotonic()

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: Any) -> None:
        """Streams the output as it comes, or sends it at the end of each sample."""
        with naming_their_fields():
            with suppress(UnavailableError, FailedPreconditionError):
                # Before any work that grows with the length.
                check_most(len(request.tokenized.input_ids), self._model().limits.context_tokens, "input_ids.ids")
            job = await self._generation.admit(request_from_vllm(request), client_of(context))
        answer = VllmAnswer(prompt_tokens=job.num_prompt_tokens, is_stream=request.stream)
        await self._generation.follow(job, context, encode=answer.messages)

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: Any) -> vllm_engine_pb2.AbortResponse:
        """Cancels requests. No effect on those that are over, or that never were: gateways abort these, too."""
        reject_unknown_fields(request)
        if len(request.request_ids) > MAX_ABORTED:
            raise InvalidArgumentError("request_ids", f"{len(request.request_ids)} ids", f"at most {MAX_ABORTED}")
        for request_id in request.request_ids:
            with suppress(NotFoundError):
                self._jobs.cancel(request_id)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Any
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Says whether requests are served now. UNAVAILABLE while there is no model to describe.

        SMG takes any answer as a sign that it can ask for the model, once and for all.
        """
        reject_unknown_fields(request)
        self._model()
        is_healthy = self._is_serving()
        message = "" if is_healthy else "this server does not serve now"
        return vllm_engine_pb2.HealthCheckResponse(healthy=is_healthy, message=message)

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Describes the model. `tokenizer_path` is a directory on this host."""
        reject_unknown_fields(request)
        model, state = self._model(), await self._state()
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=model.tokenizer_path,
            tokenizer_path=model.tokenizer_path,
            served_model_name=state.model,
            is_generation=True,
            max_context_length=state.context_tokens,
            max_req_input_len=state.context_tokens - 1,
            vocab_size=state.vocab_size,
            eos_token_ids=sorted(model.limits.eos_token_ids),
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Describes the server."""
        reject_unknown_fields(request)
        state = await self._state()
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=self._jobs.num_jobs,
            is_paused=not self._is_serving(),
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="slipstream",
            data_parallel_size=1,
            block_size=state.page_tokens,
            max_num_seqs=state.num_slots,
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Any
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Says how busy the server is: its one rank, and of the sections that are asked for the one that it has."""
        reject_unknown_fields(request)
        if request.dp_rank:
            raise InvalidArgumentError("dp_rank", request.dp_rank, "0, the only one")
        state = await self._state()
        num_used_pages = state.num_pages - state.num_free_pages
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=state.num_running,
            num_waiting_reqs=state.num_waiting,
            num_total_reqs=state.num_running + state.num_waiting,
            num_used_tokens=num_used_pages * state.page_tokens,
            max_total_num_tokens=state.num_pages * state.page_tokens,
            token_usage=num_used_pages / max(1, state.num_pages),
            utilization=state.num_running / state.num_slots,
            max_running_requests=state.num_slots,
        )
        now = datetime.now(UTC).isoformat()
        return vllm_engine_pb2.GetLoadsResponse(timestamp=now, version=state.version, dp_rank_count=1, loads=[load])
