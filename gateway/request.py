"""Checks a client's request and turns it from protobuf into plain data; all of the result can be honoured."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.wire.sequence import MAX_LISTED_IDS, MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams, SequenceSpec
from slipstream.common.wire.server import SamplingDefaults
from slipstream.gateway.chat_template import render_messages
from slipstream.gateway.config import WHOLE, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.gateway.chat_template import PromptTokenizer
    from slipstream.protos import generation_pb2

    JobRequest = generation_pb2.GenerateRequest | generation_pb2.CreateJobRequest


JOB_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

MAX_SAMPLES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_SALT_CHARACTERS = 128
MAX_CONSTRAINT_CHARACTERS = 2**18
"""Characters of a constraint, of all its alternatives together."""

SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: neighbouring seeds give samples whose seeds are far apart."""

_NOT_BESIDE = {
    "min_new_tokens": "0 with a constraint, which says where the output may end",
    "ignore_eos": "false with a constraint, after whose end nothing but the end of sequence may follow",
}
_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of the model and of the server's settings."""

    vocab_size: int
    """Token ids are below it."""
    context_tokens: int
    """Prompt and output together."""
    eos_token_ids: frozenset[int]
    """Tokens with which the model, or its tokenizer, ends a sequence."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """By name, the tokens that have no text: as a stop string, such a name is the token."""
    num_draft_tokens: int = 0
    """K; 0 when nothing drafts."""
    max_samples: int = MAX_SAMPLES
    """Samples of one request; fewer if the queue has less room."""
    default_max_new_tokens: int = 256
    """For a request that names no number; fewer if the context has less room."""
    max_characters: int | None = None
    """A longer text has too many tokens for the context in any case; None if that is not known."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """For a request that names none."""
    has_constraints: bool = False
    """True if outputs may be constrained: a grammar worker takes part in the steps."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint that an output keeps to."""

    field: str
    """The request's field, as it is called in generation.proto."""
    value: Any
    """A text, a list of texts, or true."""

    num_characters: int

    @property
    def digest(self) -> bytes:
        """Hash of it."""
        return hashlib.sha256(json.dumps([self.field, self.value]).encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request in which everything was checked: a sequence for each sample, and the gateway's own part."""

    job_id: str
    digest: bytes
    """Hash of the request as it arrived, before a seed was drawn: the same request has the same digest."""
    samples: tuple[SequenceSpec, ...]
    stop: tuple[str, ...] = ()
    """Stop strings."""
    min_new_tokens: int = 0
    """Number of first tokens whose text completes no stop string."""
    continues_prompt: bool = False
    """Whether the text continues the prompt's; the answer in a conversation is a text of its own."""
    shows_special: bool = False
    """Whether special tokens have their names in the text."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """The first tokens of each sample, in order, which another server generated."""
    constraint: Constraint | None = None
    """The output's constraint, until it is compiled: see `constrained`."""

    def constrained(self, grammar: str) -> CheckedRequest:
        """The same with a grammar, in llguidance's serialised form, that each of its samples keeps to."""
        samples = tuple(replace(sample, grammar=grammar) for sample in self.samples)
        return replace(self, samples=samples, constraint=None)

    @property
    def text_before(self) -> tuple[int, ...]:
        """The tokens that the text continues."""
        return self.samples[0].prompt if self.continues_prompt else ()


def parse_request(
    request: JobRequest, limits: RequestLimits, tokenizer: PromptTokenizer, shard: Shard = WHOLE, *, digest: bytes = b""
) -> CheckedRequest:
    """Checks a request without unknown fields. Raises InvalidArgumentError naming the field that cannot be honoured.

    An unset job id, one of `shard`, or seed is drawn here, so that the job can be named, and repeated, from then on.
    `digest`: see `digest_of`.
    """
    params = request.sampling_params
    # Cheap checks are made before the text is tokenised.
    constraint = _constraint(request, limits)
    sampling = _sampling(params, limits, _seed(request))
    stop = _stop(params)
    stop_token_ids = _stop_token_ids(params, limits)
    num_samples = _num_samples(params, limits)
    top_logprobs = _top_logprobs(params, limits)
    max_draft_tokens = _max_draft_tokens(request.speculation, limits)
    outputs = _continued(request, num_samples, stop_token_ids, limits)
    job_id = request.job_id or shard.new_job_id()
    check_job_id(job_id)
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        given = f"{len(request.cache_salt)} characters"
        raise InvalidArgumentError("cache_salt", given, f"at most {MAX_SALT_CHARACTERS} characters")
    prompt = read_prompt(request, tokenizer, limits)
    max_new_tokens = _max_new_tokens(params, len(prompt), limits)
    for index, output in enumerate(outputs):
        if len(output) > max_new_tokens:
            accepted = f"at most {max_new_tokens} tokens, as many as max_new_tokens"
            raise InvalidArgumentError(f"continuation.outputs[{index}].ids", f"{len(output)} tokens", accepted)
    min_new_tokens = _min_new_tokens(params, max_new_tokens, stop_token_ids, limits)
    if min_new_tokens and stop_token_ids:
        masked = tuple(sorted(stop_token_ids))
        sampling = replace(sampling, masked_before=len(prompt) + min_new_tokens, masked_token_ids=masked)
    first = SequenceSpec(
        job_id=job_id,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        top_logprobs=top_logprobs,
        max_draft_tokens=max_draft_tokens,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    return CheckedRequest(
        job_id=job_id,
        digest=digest,
        samples=samples_of(first, num_samples),
        stop=stop,
        min_new_tokens=min_new_tokens,
        continues_prompt=request.WhichOneof("prompt") != "messages" or request.messages.continue_final_message,
        shows_special=params.HasField("skip_special_tokens") and not params.skip_special_tokens,
        outputs=outputs,
        constraint=constraint,
    )


def digest_of(request: JobRequest) -> bytes:
    """Returns the hash of a request but for its job id, which the server may have drawn. Rejects unknown fields.

    It is equal for GenerateRequest and CreateJobRequest: their fields have the same numbers.
    """
    reject_unknown_fields(request)
    unnamed = request.__class__()
    unnamed.MergeFrom(request)  # type: ignore[arg-type]
    unnamed.ClearField("job_id")
    return hashlib.sha256(unnamed.SerializeToString(deterministic=True)).digest()


def check_job_id(job_id: str) -> None:
    """Raises InvalidArgumentError for an invalid job id."""
    if not JOB_ID.fullmatch(job_id):
        raise InvalidArgumentError("job_id", job_id, "1 to 128 characters of A-Z a-z 0-9 . _ : -")


def _seed(request: JobRequest) -> int:
    params, continued = request.sampling_params, request.continuation.seed
    if not request.HasField("continuation"):
        return params.seed if params.HasField("seed") else secrets.randbits(64)
    if params.HasField("seed") and params.seed != continued:
        raise InvalidArgumentError("continuation.seed", continued, f"{params.seed}, the seed in sampling_params")
    return continued


def _continued(
    request: JobRequest, num_samples: int, stop_token_ids: frozenset[int], limits: RequestLimits
) -> tuple[tuple[int, ...], ...]:
    field, outputs = "continuation.outputs", request.continuation.outputs
    if len(outputs) > num_samples:
        raise InvalidArgumentError(field, f"{len(outputs)} outputs", f"at most {num_samples}, one for each sample")
    for index, output in enumerate(outputs):
        check_most(len(output.ids), limits.context_tokens, f"{field}[{index}].ids")
        check_ids(output.ids, limits.vocab_size, f"{field}[{index}].ids")
        for number, token in enumerate(output.ids[:-1]):
            if token in stop_token_ids:
                accepted = "as the last token only, as it ends the output"
                raise InvalidArgumentError(f"{field}[{index}].ids[{number}]", token, accepted)
    return tuple(tuple(output.ids) for output in outputs)


def _sampling(params: generation_pb2.SamplingParams, limits: RequestLimits, seed: int) -> SamplingParams:
    # Defaults are those of SamplingParams, which also checks the ranges; NaN is in none.
    given: dict[str, Any] = {name: getattr(params, name) for name in _SAMPLING_FIELDS if params.HasField(name)}
    given = limits.sampling_defaults.given | given
    # Checked before sorting: half a million fit into a request.
    if len(params.logit_bias) > MAX_LISTED_IDS:
        given_ids = f"{len(params.logit_bias)} token ids"
        raise InvalidArgumentError("sampling_params.logit_bias", given_ids, f"at most {MAX_LISTED_IDS}")
    sampling = SamplingParams(seed=seed, logit_bias=tuple(sorted(params.logit_bias.items())), **given)
    sampling.check_token_ids(limits.vocab_size)
    return sampling


def _stop_token_ids(params: generation_pb2.SamplingParams, limits: RequestLimits) -> frozenset[int]:
    field = "sampling_params.stop_token_ids"
    if len(params.stop_token_ids) > MAX_LISTED_IDS:
        raise InvalidArgumentError(field, f"{len(params.stop_token_ids)} token ids", f"at most {MAX_LISTED_IDS}")
    check_ids(params.stop_token_ids, limits.vocab_size, field)
    named = [limits.special_tokens.get(text) for text in params.stop]
    given = frozenset(params.stop_token_ids) | {token for token in named if token is not None}
    if not params.ignore_eos:
        return given | limits.eos_token_ids
    # Ignoring a token and stopping at it contradict each other.
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("stop", named)):
        for index, token in enumerate(ids):
            if token in limits.eos_token_ids:
                value = getattr(params, name)[index]
                accepted = "with ignore_eos, a token that is not the model's end of sequence"
                raise InvalidArgumentError(f"sampling_params.{name}[{index}]", value, accepted)
    return given


def _stop(params: generation_pb2.SamplingParams) -> tuple[str, ...]:
    field = "sampling_params.stop"
    if len(params.stop) > MAX_STOPS:
        raise InvalidArgumentError(field, f"{len(params.stop)} strings", f"at most {MAX_STOPS}")
    for index, text in enumerate(params.stop):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            given = f"{len(text)} characters"
            raise InvalidArgumentError(f"{field}[{index}]", given, f"1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(params.stop)


def _num_samples(params: generation_pb2.SamplingParams, limits: RequestLimits) -> int:
    if not params.HasField("n"):
        return 1
    if not 1 <= params.n <= limits.max_samples:
        accepted = f"1 to {limits.max_samples}"
        if limits.max_samples < MAX_SAMPLES:
            accepted += ", for which the queue has room"
        raise InvalidArgumentError("sampling_params.n", params.n, accepted)
    return params.n


def _constraint(request: JobRequest, limits: RequestLimits) -> Constraint | None:
    """Returns a request's constraint, None if it has none. Whether it can be compiled is not known yet."""
    field = request.WhichOneof("constraint")
    if field is None:
        return None
    value: Any = list(request.choice.items) if field == "choice" else getattr(request, field)
    if not limits.has_constraints:
        raise InvalidArgumentError(field, value, "none: this server has no grammar worker")
    for name, accepted in _NOT_BESIDE.items():
        if other := getattr(request.sampling_params, name):
            raise InvalidArgumentError(f"sampling_params.{name}", other, accepted)
    if not value:
        accepted = (
            "at least one text" if field == "choice" else "true" if field == "json_object" else "a text, not empty"
        )
        raise InvalidArgumentError(field, value, accepted)
    texts: list[str] = value if field == "choice" else [] if field == "json_object" else [value]
    num_characters = sum(map(len, texts))
    if num_characters > MAX_CONSTRAINT_CHARACTERS:
        raise InvalidArgumentError(field, f"{num_characters} characters", f"at most {MAX_CONSTRAINT_CHARACTERS}")
    if field == "choice":
        _check_choice(texts, limits)
    return Constraint(field, value, num_characters)


def _check_choice(texts: list[str], limits: RequestLimits) -> None:
    # One pattern, as there may be hundreds of names and hundreds of thousands of texts.
    names = re.compile("|".join(map(re.escape, limits.special_tokens)) or "(?!)")
    for index, text in enumerate(texts):
        if not text:
            raise InvalidArgumentError(f"choice.items[{index}]", text, "at least one character")
        if names.search(text):
            accepted = "a text without the names of special tokens, which no text has"
            raise InvalidArgumentError(f"choice.items[{index}]", text, accepted)


def _top_logprobs(params: generation_pb2.SamplingParams, limits: RequestLimits) -> int | None:
    field, most = "sampling_params.top_logprobs", min(MAX_TOP_LOGPROBS, limits.vocab_size)
    if params.top_logprobs > most:
        raise InvalidArgumentError(field, params.top_logprobs, f"0 to {most}")
    if params.top_logprobs and not params.logprobs:
        raise InvalidArgumentError(field, params.top_logprobs, "0, or more with logprobs")
    return params.top_logprobs if params.logprobs else None


def _max_draft_tokens(speculation: generation_pb2.Speculation, limits: RequestLimits) -> int | None:
    field, most = "speculation.max_draft_tokens", limits.num_draft_tokens
    given = speculation.max_draft_tokens if speculation.HasField("max_draft_tokens") else None
    if given is not None and given > most:
        raise InvalidArgumentError(field, given, f"0 to {most}, as many as a draft of this server may have in a step")
    if speculation.HasField("enabled") and given is not None and speculation.enabled != (given > 0):
        accepted = "1 or more where enabled is true" if speculation.enabled else "0 where enabled is false"
        raise InvalidArgumentError(field, given, accepted)
    return 0 if speculation.HasField("enabled") and not speculation.enabled else given


def _max_new_tokens(params: generation_pb2.SamplingParams, prompt_tokens: int, limits: RequestLimits) -> int:
    room = limits.context_tokens - prompt_tokens
    if not params.HasField("max_new_tokens"):
        return room if params.fills_context else min(limits.default_max_new_tokens, room)
    given = params.max_new_tokens
    if not 1 <= given <= room:
        accepted = f"1 to {room}: the context has {limits.context_tokens} tokens, the prompt takes {prompt_tokens}"
        raise InvalidArgumentError("sampling_params.max_new_tokens", given, accepted)
    return given


def _min_new_tokens(
    params: generation_pb2.SamplingParams, max_new_tokens: int, stop_token_ids: frozenset[int], limits: RequestLimits
) -> int:
    field, given = "sampling_params.min_new_tokens", params.min_new_tokens
    if given > max_new_tokens:
        raise InvalidArgumentError(field, given, f"0 to {max_new_tokens}, the tokens to generate at most")
    most = min(MAX_LISTED_IDS, limits.vocab_size - 1)
    if given and len(stop_token_ids) > most:
        accepted = f"0 where more than {most} tokens end the output, here {len(stop_token_ids)}"
        raise InvalidArgumentError(field, given, accepted)
    return given


def samples_of(spec: SequenceSpec, n: int) -> tuple[SequenceSpec, ...]:
    """Returns `n` sequences that differ in their seeds; the first is `spec` itself."""
    return tuple(
        replace(spec, sampling=replace(spec.sampling, seed=sample_seed(spec.sampling.seed, index)))
        for index in range(n)
    )


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of a sample of a job: part of the contract with clients."""
    return (seed + index * SEED_STEP) & MAX_SEED


MAX_MESSAGES = 4096
"""Millions of them fit into a request, and each takes a microsecond of the event loop's time."""


def check_num_messages(request: JobRequest | generation_pb2.TokenizeRequest) -> None:
    """Raises InvalidArgumentError for too many messages, or tools."""
    for name, items in (("items", request.messages.items), ("tools", request.messages.tools)):
        if len(items) > MAX_MESSAGES:
            given = f"{len(items)} {'messages' if name == 'items' else name}"
            raise InvalidArgumentError(f"messages.{name}", given, f"at most {MAX_MESSAGES}")


def check_size(request: JobRequest, limits: RequestLimits) -> None:
    """Raises InvalidArgumentError for a prompt that is too long, before any work that grows with its length."""
    check_num_messages(request)
    check_most(len(request.input_ids.ids), limits.context_tokens, "input_ids.ids")
    # protobuf makes a new string each time that it is asked for one.
    num_in_text = len(request.text)
    num_characters = num_in_text + sum(
        len(message.content) + sum(map(len, message.content_parts)) for message in request.messages.items
    )
    if limits.max_characters is not None and num_characters > limits.max_characters:
        accepted = f"at most {limits.max_characters}, which may fit into the context of {limits.context_tokens} tokens"
        field = "text" if num_in_text else "messages"
        raise InvalidArgumentError(field, f"{num_characters} characters", accepted)


def read_prompt(request: JobRequest, tokenizer: PromptTokenizer, limits: RequestLimits) -> tuple[int, ...]:
    """Returns the prompt's token ids. Raises InvalidArgumentError naming the field that cannot be honoured."""
    vocab_size, context_tokens = limits.vocab_size, limits.context_tokens
    field = request.WhichOneof("prompt")
    if field is None:
        raise InvalidArgumentError("prompt", None, "one of text, input_ids and messages")
    check_size(request, limits)
    if field == "input_ids":
        prompt = tuple(request.input_ids.ids)
        _check_length(prompt, context_tokens, "input_ids.ids")
        check_ids(prompt, vocab_size, "input_ids.ids")
        return prompt
    if field == "text":
        if not request.text:
            raise InvalidArgumentError("text", "", "at least one character")
        prompt = tuple(tokenizer.encode(request.text))
    else:
        # The template writes the special tokens itself.
        prompt = tuple(tokenizer.encode(render_messages(request.messages, tokenizer), add_special_tokens=False))
    _check_length(prompt, context_tokens, field)
    if max(prompt) >= vocab_size:
        accepted = f"{field} that the tokenizer turns into token ids of 0 to {vocab_size - 1}"
        raise InvalidArgumentError(field, f"token id {max(prompt)}", accepted)
    return prompt


def tokenized(request: generation_pb2.TokenizeRequest, tokenizer: PromptTokenizer, limits: RequestLimits) -> list[int]:
    """Returns the tokens of a text or a conversation. Raises InvalidArgumentError naming the field."""
    if request.WhichOneof("prompt") is None:
        raise InvalidArgumentError("prompt", None, "one of text and messages")
    check_num_messages(request)
    if request.HasField("messages"):
        return tokenizer.encode(render_messages(request.messages, tokenizer), add_special_tokens=False)
    adds_special = request.add_special_tokens or not request.HasField("add_special_tokens")
    return tokenizer.encode(request.text, add_special_tokens=adds_special)


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises InvalidArgumentError for an id outside the vocabulary."""
    # `max` is one pass in C for the usual case.
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise InvalidArgumentError(f"{field}[{index}]", ids[index], f"token ids of 0 to {vocab_size - 1}")


def _check_length(prompt: Sequence[int], context_tokens: int, field: str) -> None:
    if not prompt:
        raise InvalidArgumentError(field, "no tokens", "at least one token")
    check_most(len(prompt), context_tokens, field)


def check_most(num_tokens: int, context_tokens: int, field: str) -> None:
    """Raises InvalidArgumentError for a prompt of too many tokens."""
    if num_tokens >= context_tokens:
        accepted = f"at most {context_tokens - 1}, which leaves one of the context's for the output"
        raise InvalidArgumentError(field, f"{num_tokens} tokens", accepted)
