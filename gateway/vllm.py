"""The service `vllm.grpc.engine.VllmEngine`, by which the SMG gateway serves the clients of OpenAI's interface.

Its requests become ours, our output its answers. A request has many fields for models and engines of other kinds: a
field that is not taken here is refused by its name, whatever it says.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import time
import zipfile
from contextlib import aclosing, contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from slipstream.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.wire.job import FinishReason, matched_stop_from_pb
from slipstream.common.wire.sequence import MAX_TOP_LOGPROBS
from slipstream.gateway.keys import NO_OWNER, client_of, current_owner
from slipstream.gateway.request import check_most
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from google.protobuf.message import Message

    from slipstream.common.wire.server import ServerState
    from slipstream.gateway.jobs import JobManager
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.sample import Chunk
    from slipstream.gateway.service import GenerationServicer
    from slipstream.protos import scheduler_pb2

SERVICE_NAME = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
add_to_server = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server

MAX_ABORTED = 4096
"""Requests that one call may abort: a few milliseconds of the event loop's time."""

TOKENIZER_FILES = ("config.json", "*token*.json", "vocab.json", "merges.txt", "*.model", "*.jinja", "*.tiktoken")
"""The files of a model's directory that a tokenizer is made of, as patterns; none of them has weights."""
TOKENIZER_CHUNK_BYTES = 2**20

_PARAMS = "sampling_params"

_REQUEST_FIELDS = frozenset({"request_id", "tokenized", "text", _PARAMS, "stream"})
_SAME_PARAMS = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos")
"""Sampling parameters that mean the same, 0 and false included."""
_DEFAULT_1_PARAMS = ("temperature", "top_p", "repetition_penalty")
"""1 where they are not set. For the last two that is 0, which neither can be."""
_OTHER_PARAMS = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "n", "logprobs", "seed", "logit_bias")
# They change text, and the answer has none: it is token ids, those of a stop string included.
_TEXT_PARAMS = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
_CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "structural_tag", "choice")
"""The members of `constraint`: called the same here, and so is `choice.choices`, but for its list."""
_PARAMS_FIELDS = frozenset((*_SAME_PARAMS, *_DEFAULT_1_PARAMS, *_OTHER_PARAMS, *_TEXT_PARAMS, *_CONSTRAINTS))

_THEIR_NAMES = {
    "job_id": "request_id",
    "prompt": "input",
    "input_ids.ids": "tokenized.input_ids",
    f"{_PARAMS}.max_new_tokens": f"{_PARAMS}.max_tokens",
    f"{_PARAMS}.min_new_tokens": f"{_PARAMS}.min_tokens",
    f"{_PARAMS}.top_logprobs": f"{_PARAMS}.logprobs",
    "choice.items": f"{_PARAMS}.choice.choices",
} | {name: f"{_PARAMS}.{name}" for name in _CONSTRAINTS}
"""Paths of fields of our request, by which checks name them, in theirs; all others are the same in both."""

SEED_MASK = 2**64 - 1


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
        watch_pages: Callable[[], AsyncIterator[scheduler_pb2.PageChanges]],
    ) -> None:
        """`model` and `state` as for `GenerationServicer`; `is_serving` says what health checks say.

        `watch_pages` calls the scheduler's `WatchPages`.
        """
        self._generation = generation
        self._jobs = jobs
        self._model = model
        self._state = state
        self._is_serving = is_serving
        self._watch_pages = watch_pages
        self._started_at = time.monotonic()

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: Any) -> None:
        """Streams the output as it arrives, or sends it at the end of each sample."""
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

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Any) -> None:
        """Sends the files of the model's tokenizer as a zip archive, in chunks; the last has its SHA-256."""
        reject_unknown_fields(request)
        model = self._model()
        archive = await asyncio.to_thread(tokenizer_archive, Path(model.tokenizer_path), model.identity)
        for start in range(0, len(archive), TOKENIZER_CHUNK_BYTES):
            data = archive[start : start + TOKENIZER_CHUNK_BYTES]
            is_last = start + len(data) == len(archive)
            digest = hashlib.sha256(archive).hexdigest() if is_last else ""
            await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=digest))

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Any) -> None:
        """Sends what the prefix cache has, as a snapshot, and then what it gets and loses; for requests without a salt.

        A call that names a sequence number gets a snapshot as well. Refused to a key: these are the prompts of all.
        """
        reject_unknown_fields(request)
        if current_owner() != NO_OWNER:
            message = "with --api-keys the pages of the prefix cache, which have the prompts of all keys, are not told"
            raise FailedPreconditionError(message)
        page_tokens = (await self._state()).page_tokens
        async with aclosing(kv_batches(self._watch_pages(), page_tokens)) as batches:
            async for batch in batches:
                await context.write(batch)


async def kv_batches(
    pages: AsyncIterator[scheduler_pb2.PageChanges], page_tokens: int
) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
    """Turns the scheduler's changes into theirs. Up to the first message without changes they are a snapshot."""
    # Numbers go on where those of another subscription were.
    numbers, snapshot, is_told = itertools.count(time.time_ns() // 1000), [], False
    async for message in pages:
        events = [_kv_event(change, page_tokens) for change in message.changes]
        if is_told and events:
            yield common_pb2.KvEventBatch(sequence_number=next(numbers), timestamp=time.time(), events=events)
        elif not is_told and events:
            snapshot.append(events)
        elif not is_told:
            is_told = True
            chunks = snapshot or [[]]
            chunks[0].insert(0, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))
            blocks = sum(map(len, chunks)) - 1
            for index, chunk in enumerate(chunks):
                yield common_pb2.KvEventBatch(
                    sequence_number=next(numbers),
                    timestamp=time.time(),
                    events=chunk,
                    snapshot=common_pb2.KvSnapshotChunk(index=index, count=len(chunks), blocks=blocks),
                )


def _kv_event(change: scheduler_pb2.PageChange, page_tokens: int) -> common_pb2.KvCacheEvent:
    if not change.token_ids:
        return common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=[_signed(change.key)]))
    block = common_pb2.KvBlock(block_hash=_signed(change.key), token_ids=change.token_ids, block_size=page_tokens)
    parent = _signed(change.parent) if change.parent else None
    return common_pb2.KvCacheEvent(stored=common_pb2.KvBlocksStored(blocks=[block], parent_block_hash=parent))


def _signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key


@lru_cache(maxsize=1)
def tokenizer_archive(directory: Path, identity: object) -> bytes:
    """Returns a zip archive of a model's tokenizer, the same for the same files. `identity`: the model's."""
    paths = sorted({path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            # A fixed time, for a digest that depends only on the content.
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def request_from_vllm(request: vllm_engine_pb2.GenerateRequest) -> generation_pb2.GenerateRequest:
    """Turns their request into ours. Raises InvalidArgumentError naming the field that cannot be honoured.

    Ours is checked for the model where a job is made of it; see `naming_their_fields`.
    """
    reject_unknown_fields(request)
    _refuse_others(request, _REQUEST_FIELDS, "")
    made = generation_pb2.GenerateRequest(job_id=request.request_id)
    if request.WhichOneof("input") == "tokenized":
        made.input_ids.ids.extend(request.tokenized.input_ids)
    elif request.HasField("text"):
        made.text = request.text
    _refuse_others(request.sampling_params, _PARAMS_FIELDS, f"{_PARAMS}.")
    _set_params(made.sampling_params, request.sampling_params)
    if name := request.sampling_params.WhichOneof("constraint"):
        value = getattr(request.sampling_params, name)
        if name == "choice":
            made.choice.items.extend(value.choices)
            made.choice.SetInParent()
        else:
            setattr(made, name, value)
    return made


@contextmanager
def naming_their_fields() -> Iterator[None]:
    """Raises an InvalidArgumentError about a field of our request again, with the name of theirs."""
    try:
        yield
    except InvalidArgumentError as error:
        name, bracket, index = error.field.partition("[")
        raise error.described(_THEIR_NAMES.get(name, name) + bracket + index, error.description) from error


def _refuse_others(message: Message, taken: frozenset[str], path: str) -> None:
    for field, value in message.ListFields():
        if field.name not in taken:
            raise InvalidArgumentError(path + field.name, str(value).strip(), "not set: this server cannot honour it")


def _set_params(made: generation_pb2.SamplingParams, given: vllm_engine_pb2.SamplingParams) -> None:
    for name in _SAME_PARAMS:
        setattr(made, name, getattr(given, name))
    made.temperature = given.temperature if given.HasField("temperature") else 1.0
    made.top_p = given.top_p or 1.0
    made.repetition_penalty = given.repetition_penalty or 1.0
    made.n = given.n or 1
    if given.HasField("max_tokens"):
        made.max_new_tokens = given.max_tokens
    made.fills_context = not given.HasField("max_tokens")
    made.min_new_tokens = given.min_tokens
    made.stop.extend(given.stop)
    made.stop_token_ids.extend(given.stop_token_ids)
    if given.HasField("seed"):
        made.seed = given.seed & SEED_MASK
    if given.HasField("logprobs"):
        if not 0 <= given.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidArgumentError(f"{_PARAMS}.logprobs", given.logprobs, f"0 to {MAX_TOP_LOGPROBS}")
        made.logprobs = True
        made.top_logprobs = given.logprobs
    for token, bias in given.logit_bias.items():
        if token < 0:
            raise InvalidArgumentError(f"{_PARAMS}.logit_bias", token, "token ids of 0 or more")
        made.logit_bias[token] = bias


class VllmAnswer:
    """Turns the chunks of a job into their answers, one job's each.

    A stream has a message for each chunk, and one for the end of each sample. Without a stream there is only the last,
    with the whole output of the sample; they are sent together, in the order of the samples, when all have ended.
    """

    def __init__(self, *, prompt_tokens: int, is_stream: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._is_stream = is_stream
        self._kept: dict[int, list[Chunk]] = {}
        """By sample: its chunks, which are sent at the end."""

    def messages(self, chunk: Chunk) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yields the messages that a chunk leads to."""
        if self._is_stream:
            yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(chunk))
            if chunk.finish_reason:
                yield vllm_engine_pb2.GenerateResponse(complete=_complete([], chunk))
            return
        self._kept.setdefault(chunk.sample_index, []).append(chunk)
        if chunk.HasField("job_usage"):
            for _, kept in sorted(self._kept.items()):
                yield vllm_engine_pb2.GenerateResponse(complete=_complete(kept, kept[-1]))

    def _chunk(self, chunk: Chunk) -> vllm_engine_pb2.GenerateStreamChunk:
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(chunk.token_ids),
            output_logprobs=_logprobs([chunk]),
            index=chunk.sample_index,
        )


def _complete(kept: Sequence[Chunk], last: Chunk) -> vllm_engine_pb2.GenerateComplete:
    """Makes the message of a sample's end, with the output of the chunks in `kept`."""
    matched, usage = matched_stop_from_pb(last), last.usage
    stop: dict[str, Any] = {}
    if matched is not None:
        stop = {"matched_stop_str" if isinstance(matched, str) else "matched_token_id": matched}
    return vllm_engine_pb2.GenerateComplete(
        output_ids=[token for chunk in kept for token in chunk.token_ids],
        finish_reason=str(FinishReason.from_pb(last.finish_reason)),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        output_logprobs=_logprobs(kept),
        index=last.sample_index,
        spec_accepted_tokens=usage.total_accepted_tokens,
        spec_draft_tokens=usage.total_draft_tokens,
        **stop,
    )


def _logprobs(chunks: Sequence[Chunk]) -> vllm_engine_pb2.OutputLogProbs | None:
    """Returns the logprobs of the tokens of some chunks; None if the request did not ask for them."""
    logprobs = [token for chunk in chunks for token in chunk.logprobs]
    if not logprobs:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[token.logprob for token in logprobs],
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        top_logprobs=[
            vllm_engine_pb2.TopLogProbs(values=token.top_logprobs, token_ids=token.top_token_ids) for token in logprobs
        ],
    )
