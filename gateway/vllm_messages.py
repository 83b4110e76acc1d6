"""The messages of `vllm.grpc.engine.VllmEngine`: its requests as ours, our output as its answers.

Its request has many fields for models and engines of other kinds. A field that is not taken here is refused by its
name, whatever it says.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import vllm_engine_pb2

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.wire.sequence import MAX_TOP_LOGPROBS
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.message import Message

    from slipstream.common.wire.job import OutputChunk, TokenLogprobs

_PARAMS = "sampling_params"

_REQUEST_FIELDS = frozenset({"request_id", "tokenized", "text", _PARAMS, "stream"})
_SAME_PARAMS = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos")
"""Sampling parameters that mean the same, 0 and false included."""
_DEFAULT_1_PARAMS = ("temperature", "top_p", "repetition_penalty")
"""1 where they are not set. For the last two that is 0, which neither can be."""
_OTHER_PARAMS = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "n", "logprobs", "seed", "logit_bias")
# They change text, and the answer has none: it is token ids, those of a stop string included.
_TEXT_PARAMS = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
_PARAMS_FIELDS = frozenset((*_SAME_PARAMS, *_DEFAULT_1_PARAMS, *_OTHER_PARAMS, *_TEXT_PARAMS))

_THEIR_NAMES = {
    "job_id": "request_id",
    "prompt": "input",
    "input_ids.ids": "tokenized.input_ids",
    f"{_PARAMS}.max_new_tokens": f"{_PARAMS}.max_tokens",
    f"{_PARAMS}.min_new_tokens": f"{_PARAMS}.min_tokens",
    f"{_PARAMS}.top_logprobs": f"{_PARAMS}.logprobs",
}
"""Paths of fields of our request, by which checks name them, in theirs; all others are the same in both."""

SEED_MASK = 2**64 - 1


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
    with the whole output of the sample; they come together, in the order of the samples, when all have ended.
    """

    def __init__(self, *, prompt_tokens: int, is_stream: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._is_stream = is_stream
        self._kept: dict[int, list[OutputChunk]] = {}
        """By sample: its chunks, which are sent at the end."""

    def messages(self, chunk: OutputChunk) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yields the messages that a chunk leads to."""
        if self._is_stream:
            yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(chunk))
            if chunk.finish_reason is not None:
                yield vllm_engine_pb2.GenerateResponse(complete=_complete([], chunk))
            return
        self._kept.setdefault(chunk.sample_index, []).append(chunk)
        if chunk.job_usage is not None:
            for _, kept in sorted(self._kept.items()):
                yield vllm_engine_pb2.GenerateResponse(complete=_complete(kept, kept[-1]))

    def _chunk(self, chunk: OutputChunk) -> vllm_engine_pb2.GenerateStreamChunk:
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(chunk.token_ids),
            output_logprobs=_logprobs([chunk]),
            index=chunk.sample_index,
        )


def _complete(kept: Sequence[OutputChunk], last: OutputChunk) -> vllm_engine_pb2.GenerateComplete:
    """The end of a sample, with the output of the chunks in `kept`."""
    usage, matched = last.usage, last.matched_stop
    assert usage is not None, "the last chunk of a sample has its usage"
    stop: dict[str, Any] = {}
    if matched is not None:
        stop = {"matched_stop_str" if isinstance(matched, str) else "matched_token_id": matched}
    return vllm_engine_pb2.GenerateComplete(
        output_ids=[token for chunk in kept for token in chunk.token_ids],
        finish_reason=str(last.finish_reason),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        output_logprobs=_logprobs(kept),
        index=last.sample_index,
        spec_accepted_tokens=usage.total_accepted_tokens,
        spec_draft_tokens=usage.total_draft_tokens,
        **stop,
    )


def _logprobs(chunks: Sequence[OutputChunk]) -> vllm_engine_pb2.OutputLogProbs | None:
    """The logprobs of the tokens of some chunks; None if the request did not ask for them."""
    tokens: list[tuple[int, TokenLogprobs]] = [
        pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=bool(chunk.logprobs))
    ]
    if not tokens:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[logprobs.logprob for _, logprobs in tokens],
        token_ids=[token for token, _ in tokens],
        top_logprobs=[
            vllm_engine_pb2.TopLogProbs(
                values=[logprob for _, logprob in logprobs.top], token_ids=[token for token, _ in logprobs.top]
            )
            for _, logprobs in tokens
        ],
    )
