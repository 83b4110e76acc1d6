"""The `Generation` service: decodes requests, calls the job manager, encodes its answers.

And the `Recorder` service, which returns the times of the last requests.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import FailedPreconditionError, InvalidArgumentError
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.wire.trace import HostRecords
from slipstream.gateway.delivery import Deliveries
from slipstream.gateway.keys import client_of, current_owner
from slipstream.gateway.metrics import TimesOfRequests
from slipstream.gateway.request import (
    check_ids,
    check_job_id,
    check_most,
    check_num_messages,
    digest_of,
    parse_request,
    tokenized,
)
from slipstream.protos import generation_pb2, generation_pb2_grpc, trace_pb2, trace_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from slipstream.common.wire.server import ServerState
    from slipstream.gateway.constraints import GrammarCompiler
    from slipstream.gateway.delivery import DeliveredOutput
    from slipstream.gateway.job import Job
    from slipstream.gateway.jobs import JobManager
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.peers import Peers
    from slipstream.gateway.request import CheckedRequest, JobRequest
    from slipstream.gateway.stream import Encode, JobReader, StreamWrites
    from slipstream.gateway.tokenize_queue import TokenizeQueue

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
RECORDER = trace_pb2.DESCRIPTOR.services_by_name["Recorder"].full_name

LONG_TEXT_CHARACTERS = 4096
"""About a millisecond of tokenising, in which the event loop serves no other call."""

LARGE_REQUEST_BYTES = 2**16
"""Bytes of a request from which on it is looked through on a thread, in fair turns."""


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Serves clients. The interceptor turns exceptions into statuses."""

    def __init__(
        self,
        jobs: JobManager,
        *,
        model: Callable[[], ServedModel],
        state: Callable[[], Awaitable[ServerState]],
        turns: TokenizeQueue,
        grammars: GrammarCompiler,
        peers: Peers,
        writes: StreamWrites,
        served_names: tuple[str, ...] = (),
    ) -> None:
        """`model` and `state` return the present ones, or raise UnavailableError.

        Long texts are tokenised in `turns`. `served_names`: of the model; by default its own name.
        """
        self._jobs = jobs
        self._model = model
        self._state = state
        self._turns = turns
        self._grammars = grammars
        self._peers = peers
        self._writes = writes
        self._served_names = served_names
        self.request_times = TimesOfRequests()
        self.deliveries = Deliveries(writes)

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        from_tokens, attempt = _take_resume(request)
        if not from_tokens:
            from_tokens = [len(output.ids) for output in request.continuation.outputs]
        output = self.deliveries.take(request) if request.HasField("delivery") else None
        try:
            job = await self.admit(request, client_of(context), attempt=attempt)
            await self.follow(job, context, from_tokens, attempt=attempt, output=output)
        finally:
            if output is not None:
                output.leave()

    async def Deliver(self, request: generation_pb2.DeliverRequest, context: Any) -> None:
        reject_unknown_fields(request)
        await self.deliveries.serve(context)

    async def CreateJob(
        self, request: generation_pb2.CreateJobRequest, context: Any
    ) -> generation_pb2.CreateJobResponse:
        job = await self.admit(request, client_of(context))
        self._jobs.detach(job)
        await self._jobs.journal.flush()
        return generation_pb2.CreateJobResponse(job=job.info().to_pb())

    async def WatchJob(self, request: generation_pb2.WatchJobRequest, context: Any) -> None:
        job = self._named(request)
        if request.from_token and request.from_tokens:
            given = f"{len(request.from_tokens)} numbers"
            raise InvalidArgumentError("from_tokens", given, "none where from_token is given")
        field, offsets = "from_token", [request.from_token]
        if request.from_tokens:
            field, offsets = "from_tokens", list(request.from_tokens)
        await self._send(self._jobs.reader(job, offsets, field=field, attempt=request.attempt), context)

    async def GetJob(self, request: generation_pb2.GetJobRequest, context: Any) -> generation_pb2.GetJobResponse:
        return generation_pb2.GetJobResponse(job=self._named(request).info().to_pb())

    async def ListJobs(self, request: generation_pb2.ListJobsRequest, context: Any) -> generation_pb2.ListJobsResponse:
        reject_unknown_fields(request)
        return await self._peers.page(request.page_size, request.page_token)

    async def CancelJob(
        self, request: generation_pb2.CancelJobRequest, context: Any
    ) -> generation_pb2.CancelJobResponse:
        reject_unknown_fields(request)
        check_job_id(request.job_id)
        self._jobs.cancel(request.job_id)
        await self._jobs.journal.flush()
        return generation_pb2.CancelJobResponse()

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: Any
    ) -> generation_pb2.GetServerInfoResponse:
        reject_unknown_fields(request)
        state = await self._state()
        model = self._model()
        (tools, reasoning), defaults = model.formats, model.limits.sampling_defaults
        names = self._served_names or (state.model,)
        state = replace(state, served_names=names, tool_call_format=tools, reasoning_format=reasoning)
        return replace(state, sampling_defaults=defaults if defaults.given else None).to_pb()

    async def Tokenize(self, request: generation_pb2.TokenizeRequest, context: Any) -> generation_pb2.TokenizeResponse:
        model = self._model()

        def tokenize() -> generation_pb2.TokenizeResponse:
            reject_unknown_fields(request)
            ids = tokenized(request, model.tokenizer, model.limits)
            return generation_pb2.TokenizeResponse(ids=ids, tokens=map(model.vocabulary.token_bytes, ids))

        return await self._turns.run(client_of(context), request.ByteSize(), tokenize)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Any
    ) -> generation_pb2.DetokenizeResponse:
        model, ids = self._model(), request.input_ids.ids

        def detokenize() -> generation_pb2.DetokenizeResponse:
            reject_unknown_fields(request)
            check_most(len(ids), model.limits.context_tokens + 1, "input_ids.ids")
            check_ids(ids, model.limits.vocab_size, "input_ids.ids")
            vocabulary = model.vocabulary.for_output(shows_special=not request.skip_special_tokens)
            return generation_pb2.DetokenizeResponse(text=vocabulary.decode(ids))

        return await self._turns.run(client_of(context), request.ByteSize(), detokenize)

    def _named(self, request: generation_pb2.WatchJobRequest | generation_pb2.GetJobRequest) -> Job:
        reject_unknown_fields(request)
        check_job_id(request.job_id)
        return self._jobs.get(request.job_id)

    async def admit(self, request: JobRequest, client: str, *, attempt: int = 0) -> Job:
        """Returns the job of a request, new or not. Raises FailedPreconditionError if its attempt is not `attempt`.

        0 is any attempt.
        """
        received_ns = time.monotonic_ns()
        check_num_messages(request)
        num_bytes = request.ByteSize()
        if num_bytes < LARGE_REQUEST_BYTES:
            digest = digest_of(request)
        else:
            digest = await self._turns.run(client, num_bytes, partial(digest_of, request))
        checked: CheckedRequest | None = None
        model: ServedModel | None = None
        while True:
            # A request that was made before needs no model, nor room in the queue, unless its job was left or failed.
            job = self._jobs.find(request.job_id, digest)
            if job is not None and not job.can_go_on:
                return job
            present = self._present_model()
            if job is not None and job.model_identity == present.identity:
                self._jobs.go_on(job, present)
                return job
            if attempt:
                message = f"attempt: got {attempt}, but job {request.job_id!r} is not known any more"
                raise FailedPreconditionError(message)
            if checked is None or present is not model:
                # Before the text is tokenised: under overload most requests get no further.
                self._jobs.check_room()
                model = present
                parse = partial(parse_request, request, model.limits, model.tokenizer, self._peers.shard, digest=digest)
                # The time that a chat template takes is unbounded.
                if len(request.text) > LONG_TEXT_CHARACTERS or request.HasField("messages"):
                    checked = await self._turns.run(client, num_bytes, parse)
                else:
                    checked = parse()
                if checked.constraint is not None:
                    checked = checked.constrained(await self._grammars.compile(checked.constraint, model, client))
                # Meanwhile another call may have made the job, and workers with another model may have attached.
                continue
            tokenised_ns = time.monotonic_ns()
            job = self._jobs.create(checked, model, job)
            job.times.received_ns, job.times.tokenised_ns = received_ns, tokenised_ns
            self.request_times.add(job.number, job.owner, job.times)
            return job

    async def follow(
        self,
        job: Job,
        context: Any,
        from_tokens: Sequence[int] = (),
        *,
        attempt: int = 0,
        encode: Encode | None = None,
        output: DeliveredOutput | None = None,
    ) -> None:
        """Sends a job's output to a caller that it lives for: each chunk or the messages that `encode` makes of it.

        `output`: where it is delivered in place of the call.
        """
        self._jobs.enter(job)
        try:
            reader = self._jobs.reader(job, from_tokens, field="resume.from_tokens", attempt=attempt)
            if output is None:
                await self._send(reader, context, encode)
            else:
                await asyncio.create_task(output.send(reader, context.time_remaining()))
        finally:
            self._jobs.leave(job, context.time_remaining())

    def _present_model(self) -> ServedModel:
        with self._jobs.counting_refusals():
            return self._model()

    async def _send(self, reader: JobReader, context: Any, encode: Encode | None = None) -> None:
        timeout_s = context.time_remaining()
        async with self._writes.bounding(context.write) as write:
            # In a task of its own, which each message wakes: the way to it would lead through all interceptors' frames.
            await asyncio.create_task(reader.send(write, encode=encode, timeout_s=timeout_s))


def _take_resume(request: generation_pb2.GenerateRequest) -> tuple[list[int], int]:
    """Takes the offsets and the attempt out of a request; what remains is the same for every call for its job."""
    if not request.HasField("resume"):
        return [], 0
    reject_unknown_fields(request.resume, "resume")
    from_tokens, attempt = list(request.resume.from_tokens), request.resume.attempt
    request.ClearField("resume")
    return from_tokens, attempt


class RecorderServicer(trace_pb2_grpc.RecorderServicer):
    """Serves `Recorder` on a gateway: with an API key, that key's requests; where none is asked for, all."""

    def __init__(self, times: TimesOfRequests) -> None:
        self._times = times

    async def ReadRecords(self, request: trace_pb2.ReadRecordsRequest, context: Any) -> trace_pb2.ReadRecordsResponse:
        reject_unknown_fields(request)
        records = self._times.records(current_owner(), request.from_step)
        return HostRecords(0, tuple(records), None).to_pb()
