"""A client's request, checked: what leaves here can be honoured in full, and is not protobuf any more."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.sampling import SamplingParams
from slipstream.common.unknown_fields import reject_unknown_fields
from slipstream.scheduler.jobs import JobSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.protos import generation_pb2

    JobRequest = generation_pb2.GenerateRequest | generation_pb2.CreateJobRequest

JOB_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Tokenizer(Protocol):
    """What is asked of a `transformers` tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model's tokenizer adds of its own accord."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the model and the server's settings allow."""

    vocab_size: int
    """Token ids are below it."""
    context_tokens: int
    """Prompt and output together."""
    eos_token_ids: frozenset[int]
    """Tokens with which the model ends a sequence."""
    default_max_new_tokens: int = 256
    """For a request that does not say; less where the context has no room for as many."""


def parse_request(request: JobRequest, limits: RequestLimits, tokenizer: Tokenizer) -> JobSpec:
    """Turns a request into a job. Raises InvalidArgumentError naming the field that cannot be honoured.

    An unset job id or seed is drawn here, so that the job can be told, and repeated, from then on.
    """
    reject_unknown_fields(request)
    params = request.sampling_params
    # What is cheap to check comes before the text is tokenised.
    sampling = _sampling(params)
    stop_token_ids = _stop_token_ids(params, limits)
    job_id = _job_id(request.job_id)
    prompt = _prompt(request, limits, tokenizer)
    return JobSpec(
        job_id=job_id,
        prompt=prompt,
        max_new_tokens=_max_new_tokens(request, len(prompt), limits),
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        digest=digest_of(request),
    )


def digest_of(request: JobRequest) -> bytes:
    """The same for the same request, whichever of the two it came by: their fields have the same numbers."""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()


def check_job_id(job_id: str) -> None:
    """Raises InvalidArgumentError for a name that no job can have."""
    if not JOB_ID.fullmatch(job_id):
        raise InvalidArgumentError("job_id", job_id, "1 to 128 characters of A-Z a-z 0-9 . _ : -")


def _job_id(given: str) -> str:
    if not given:
        return secrets.token_hex(16)
    check_job_id(given)
    return given


def _sampling(params: generation_pb2.SamplingParams) -> SamplingParams:
    # Defaults are those of SamplingParams, which also checks the ranges; NaN is in none.
    given = {
        name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p") if params.HasField(name)
    }
    seed = params.seed if params.HasField("seed") else secrets.randbits(64)
    return SamplingParams(seed=seed, **given)


def _stop_token_ids(params: generation_pb2.SamplingParams, limits: RequestLimits) -> frozenset[int]:
    field = "sampling_params.stop_token_ids"
    _check_ids(params.stop_token_ids, limits.vocab_size, field)
    given = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        return given | limits.eos_token_ids
    # To go on after a token and to stop at it: one of the two is a mistake, and we cannot tell which.
    for index, token in enumerate(params.stop_token_ids):
        if token in limits.eos_token_ids:
            raise InvalidArgumentError(
                f"{field}[{index}]", token, "with ignore_eos, a token that is not the model's end of sequence"
            )
    return given


def _prompt(request: JobRequest, limits: RequestLimits, tokenizer: Tokenizer) -> tuple[int, ...]:
    field = request.WhichOneof("prompt")
    if field is None:
        raise InvalidArgumentError("prompt", None, "one of text and input_ids")
    if field == "text":
        if not request.text:
            raise InvalidArgumentError("text", "", "at least one character")
        prompt = tuple(tokenizer.encode(request.text))
        _check_length(prompt, limits, "text")
        if max(prompt) >= limits.vocab_size:
            accepted = f"text that the tokenizer turns into token ids of 0 to {limits.vocab_size - 1}"
            raise InvalidArgumentError("text", f"token id {max(prompt)}", accepted)
        return prompt
    prompt = tuple(request.input_ids.ids)
    _check_length(prompt, limits, "input_ids.ids")
    _check_ids(prompt, limits.vocab_size, "input_ids.ids")
    return prompt


def _check_length(prompt: Sequence[int], limits: RequestLimits, field: str) -> None:
    if not prompt:
        raise InvalidArgumentError(field, "no tokens", "at least one token")
    if len(prompt) >= limits.context_tokens:
        accepted = f"at most {limits.context_tokens - 1}, which leaves one of the context's for the output"
        raise InvalidArgumentError(field, f"{len(prompt)} tokens", accepted)


def _check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    # One pass in C for the many that are right.
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise InvalidArgumentError(f"{field}[{index}]", ids[index], f"token ids of 0 to {vocab_size - 1}")


def _max_new_tokens(request: JobRequest, prompt_tokens: int, limits: RequestLimits) -> int:
    room = limits.context_tokens - prompt_tokens
    if not request.sampling_params.HasField("max_new_tokens"):
        return min(limits.default_max_new_tokens, room)
    given = request.sampling_params.max_new_tokens
    if not 1 <= given <= room:
        accepted = f"1 to {room}: the context has {limits.context_tokens} tokens, the prompt takes {prompt_tokens}"
        raise InvalidArgumentError("sampling_params.max_new_tokens", given, accepted)
    return given
