"""Requests that cannot be honoured, each refused by the name of the field."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.gateway.request import JOB_ID, SEED_STEP, CheckedRequest, RequestLimits, digest_of, parse_request
from slipstream.protos import generation_pb2

LIMITS = RequestLimits(vocab_size=1000, context_tokens=512, eos_token_ids=frozenset({1, 2}), num_draft_tokens=4)


class WordTokenizer:
    """A token a word: its number. Begins with token 7, as tokenizers do that have a first token."""

    chat_template: str | None = (
        "{% for said in messages %}{{ {'system': 10, 'user': 11, 'assistant': 12}[said.role] }} {{ said.content }} "
        "{% endfor %}{% if add_generation_prompt %}12{% endif %}"
    )
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`."""
        return [*([7] if add_special_tokens else []), *(int(word) for word in text.split())]


def parse_all(request: generation_pb2.GenerateRequest, limits: RequestLimits = LIMITS) -> CheckedRequest:
    """Validates a request, with all of its samples."""
    return parse_request(request, limits, WordTokenizer(), digest=digest_of(request))


def parse(request: generation_pb2.GenerateRequest, limits: RequestLimits = LIMITS) -> SequenceSpec:
    """The first job of a request."""
    return parse_all(request, limits).samples[0]


def speculating(**speculation: Any) -> generation_pb2.GenerateRequest:
    """A request with a bound of draft tokens."""
    return generation_pb2.GenerateRequest(input_ids={"ids": (5, 6)}, speculation=speculation)


def text_of(text: str) -> generation_pb2.GenerateRequest:
    """A request with a text."""
    return generation_pb2.GenerateRequest(text=text)


def conversation(*messages: tuple[str, str]) -> generation_pb2.GenerateRequest:
    """A request with messages: roles, and what was said."""
    items = [{"role": role, "content": content} for role, content in messages]
    return generation_pb2.GenerateRequest(messages={"items": items})


def request_of(ids: Any = (5, 6), *, job_id: str = "", **params: Any) -> generation_pb2.GenerateRequest:
    """A request with a prompt of token ids."""
    return generation_pb2.GenerateRequest(job_id=job_id, input_ids={"ids": ids}, sampling_params=params)


def refusal(request: generation_pb2.GenerateRequest, limits: RequestLimits = LIMITS) -> str:
    """The name of the field that a request is refused for."""
    with pytest.raises(InvalidArgumentError) as caught:
        parse(request, limits)
    return caught.value.field


def test_all_options_of_a_request_are_in_the_job() -> None:
    request = request_of(
        (5, 6),
        job_id="a-Z_0.9:x",
        max_new_tokens=510,
        min_new_tokens=3,
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.25,
        stop=["b", "\n\n"],
        repetition_penalty=1.5,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias={9: -100, 3: 1.5},
        logprobs=True,
        top_logprobs=20,
        stop_token_ids=[9, 9, 10],
        seed=2**64 - 1,
    )
    request.speculation.max_draft_tokens = 4
    request.priority = -2
    checked = parse_all(request)
    assert (checked.job_id, checked.stop, checked.min_new_tokens) == ("a-Z_0.9:x", ("b", "\n\n"), 3)
    (spec,) = checked.samples
    assert (spec.job_id, spec.prompt, spec.max_new_tokens) == ("a-Z_0.9:x", (5, 6), 510)
    assert spec.stop_token_ids == {1, 2, 9, 10}
    assert spec.sampling == SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias=((3, 1.5), (9, -100.0)),
        seed=2**64 - 1,
        # No token that ends the output is the first, second or third after the two of the prompt.
        masked_before=5,
        masked_token_ids=(1, 2, 9, 10),
    )
    assert (spec.top_logprobs, spec.max_draft_tokens, spec.priority) == (20, 4, -2)


def test_defaults() -> None:
    checked = parse_all(request_of())
    (spec,) = checked.samples
    assert JOB_ID.fullmatch(spec.job_id)
    assert (checked.stop, checked.min_new_tokens) == ((), 0)
    assert (spec.max_new_tokens, spec.stop_token_ids, spec.cache_salt) == (256, {1, 2}, "")
    assert (spec.top_logprobs, spec.max_draft_tokens, spec.priority) == (None, None, 0)
    assert spec.sampling == SamplingParams(seed=spec.sampling.seed)
    assert not spec.sampling.adjusts_logits
    # Nothing ends the output, so there is nothing to mask.
    assert not parse(request_of(min_new_tokens=3, ignore_eos=True)).sampling.adjusts_logits


def test_an_unset_job_id_or_seed_is_drawn_anew_and_a_set_one_is_not() -> None:
    specs = [parse(request_of()) for _ in range(3)]
    assert len({spec.job_id for spec in specs}) == 3
    assert len({spec.sampling.seed for spec in specs}) == 3
    assert parse(request_of(seed=0)).sampling.seed == 0


@pytest.mark.parametrize(
    ("request_given", "field", "expected"),
    [
        # A text has the tokens that the tokenizer adds of its own accord, a conversation only the template's.
        (text_of("3 4"), "prompt", (7, 3, 4)),
        (
            conversation(("system", "1"), ("user", "2"), ("assistant", ""), ("user", "3")),
            "prompt",
            (10, 1, 11, 2, 12, 11, 3, 12),
        ),
        # The default length fills what room there is.
        (request_of([5] * 511), "max_new_tokens", 1),
        (request_of([5] * 256), "max_new_tokens", 256),
        (request_of([5] * 257), "max_new_tokens", 255),
        (request_of(ignore_eos=True), "stop_token_ids", set()),
        (request_of(ignore_eos=True, stop_token_ids=[9]), "stop_token_ids", {9}),
        (request_of(ignore_eos=True, stop_token_ids=range(3, 259)), "stop_token_ids", set(range(3, 259))),
        (request_of(stop_token_ids=[2]), "stop_token_ids", {1, 2}),
        (request_of(logprobs=True), "top_logprobs", 0),
        (speculating(enabled=True), "max_draft_tokens", None),
        (speculating(enabled=False), "max_draft_tokens", 0),
        (speculating(max_draft_tokens=0), "max_draft_tokens", 0),
        (speculating(max_draft_tokens=3), "max_draft_tokens", 3),
        (speculating(enabled=True, max_draft_tokens=4), "max_draft_tokens", 4),
        (speculating(enabled=False, max_draft_tokens=0), "max_draft_tokens", 0),
    ],
)
def test_a_field_of_the_job(request_given: generation_pb2.GenerateRequest, field: str, expected: object) -> None:
    assert getattr(parse(request_given), field) == expected


def seconds_of(work: Callable[[], object]) -> float:
    """This thread's processor time for some work; neighbours on its core make it longer: take the least of some."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def test_the_largest_choice_is_checked_in_a_moment() -> None:
    """All clients wait meanwhile. Llama 3 has as many names."""
    names = {f"<|reserved_special_token_{number}|>": number for number in range(256)}
    limits, texts = replace(LIMITS, special_tokens=names, has_constraints=True), ["a"] * (2**18 - 40)
    request = request_of()
    request.choice.items.extend(texts)
    assert min(seconds_of(partial(parse, request, limits)) for _ in range(3)) < 0.6
    request.choice.items.append("a<|reserved_special_token_255|>")
    assert refusal(request, limits) == f"choice.items[{len(texts)}]"


def test_the_name_of_a_special_token_as_a_stop_string_is_that_token() -> None:
    limits = replace(LIMITS, special_tokens={"<|im_end|>": 9, "</s>": 2})
    checked = parse_all(request_of(stop=["x", "<|im_end|>", "a<|im_end|>"], min_new_tokens=1), limits)
    # A text that spells the name ends the output, too.
    assert checked.stop == ("x", "<|im_end|>", "a<|im_end|>")
    (spec,) = checked.samples
    assert spec.stop_token_ids == {1, 2, 9}
    assert spec.sampling.masked_token_ids == (1, 2, 9)
    assert parse(request_of(ignore_eos=True, stop=["<|im_end|>"]), limits).stop_token_ids == {9}
    assert refusal(request_of(ignore_eos=True, stop=["x", "</s>"]), limits) == "sampling_params.stop[1]"


UNKNOWN = b"\xf8\x07\x01"
PARAMS: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: value}) for name in ("temperature", "top_p", "min_p") for value in (math.nan, math.inf, -math.inf)),
    *((name, {name: value}) for name in ("temperature", "top_p", "min_p") for value in (-0.5, 101.0)),
    ("top_p", {"top_p": 0.0}),
    ("top_k", {"top_k": 2**31}),
    ("top_k", {"top_k": 2**32 - 1}),
    *(("max_new_tokens", {"max_new_tokens": value}) for value in (0, 511, 512, 2**31, 2**32 - 1)),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop[0]", {"stop": ["a" * 257]}),
    ("min_new_tokens", {"min_new_tokens": 257}),
    ("min_new_tokens", {"min_new_tokens": 3, "max_new_tokens": 2}),
    ("min_new_tokens", {"min_new_tokens": 1, "stop_token_ids": list(range(3, 259))}),
    ("stop_token_ids", {"stop_token_ids": list(range(257))}),
    ("stop_token_ids", {"stop_token_ids": [9] * 257}),
    ("stop_token_ids[1]", {"stop_token_ids": [999, 1000]}),
    # To ignore a token and to stop at it is a contradiction.
    ("stop_token_ids[1]", {"stop_token_ids": [9, 2], "ignore_eos": True}),
    ("top_logprobs", {"top_logprobs": 1}),
    ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": math.nan}),
    ("presence_penalty", {"presence_penalty": -2.5}),
    ("logit_bias", {"logit_bias": {1000: 1.0}}),
    ("logit_bias[7]", {"logit_bias": {7: 101.0}}),
    ("logit_bias[7]", {"logit_bias": {7: math.nan}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(257), 1.0)}),
]
REFUSED = [
    *((f"sampling_params.{field}", request_of(**params)) for field, params in PARAMS),
    *(("job_id", request_of(job_id=job_id)) for job_id in ("a b", "ä", "a\n", "a" * 129, "../a", "a/b", "٣")),
    ("prompt", generation_pb2.GenerateRequest()),
    ("prompt", generation_pb2.GenerateRequest(sampling_params={"seed": 1})),
    ("text", text_of("")),
    ("text", text_of("5 " * 511)),
    ("text", text_of("3 1000")),
    ("input_ids.ids", request_of([])),
    ("input_ids.ids", request_of([5] * 512)),
    ("input_ids.ids[3]", request_of([999, 5, 5, 1000, 1001])),
    ("input_ids.ids[0]", request_of([2**32 - 1])),
    ("messages.items", conversation()),
    ("messages.items[1].role", conversation(("user", "1"), ("judge", "2"))),
    ("messages.items[0].role", conversation(("", "1"))),
    ("messages", conversation(("user", "1000"))),
    ("messages", conversation(("user", "5 " * 512))),
    ("speculation.max_draft_tokens", speculating(max_draft_tokens=5)),
    ("speculation.max_draft_tokens", speculating(enabled=False, max_draft_tokens=1)),
    ("speculation.max_draft_tokens", speculating(enabled=True, max_draft_tokens=0)),
    ("127", generation_pb2.GenerateRequest.FromString(request_of().SerializeToString() + UNKNOWN)),
    (
        "sampling_params.127",
        generation_pb2.GenerateRequest(text="5", sampling_params=generation_pb2.SamplingParams.FromString(UNKNOWN)),
    ),
]


@pytest.mark.parametrize(("field", "request_given"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_field(
    field: str, request_given: generation_pb2.GenerateRequest
) -> None:
    assert refusal(request_given) == field


def test_the_message_says_what_was_given_and_what_is_accepted() -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape("got 600, accepted: 1 to 510: the context has 512")):
        parse(request_of((5, 6), max_new_tokens=600))


def test_a_text_without_tokens() -> None:
    class Nothing(WordTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(InvalidArgumentError, match="no tokens") as caught:
        parse_request(text_of(" "), LIMITS, Nothing())
    assert caught.value.field == "text"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    class Unused(WordTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("tokenised")

    limits = replace(LIMITS, max_characters=100)
    messages = conversation(("user", "x" * 60), ("user", "x" * 41))
    for field, request in (("text", text_of("x" * 101)), ("messages", messages)):
        with pytest.raises(InvalidArgumentError, match=r"101 characters.*at most 100") as caught:
            parse_request(request, limits, Unused())
        assert caught.value.field == field


def test_samples_differ_only_in_their_seeds() -> None:
    specs = parse_all(request_of((5, 6), n=16, seed=2**64 - 2)).samples
    assert [spec.sampling.seed for spec in specs] == [(2**64 - 2 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(16)]
    assert len({spec.sampling.seed for spec in specs}) == 16
    assert len({replace(spec, sampling=replace(spec.sampling, seed=0)) for spec in specs}) == 1
    drawn = [spec.sampling.seed for spec in parse_all(request_of(n=2)).samples]
    assert (drawn[1] - drawn[0]) % 2**64 == SEED_STEP


def test_the_longest_stop_string_is_counted_in_characters() -> None:
    assert parse_all(request_of(stop=["你" * 256])).stop == ("你" * 256,)


def test_smaller_limits_bound_more() -> None:
    small = RequestLimits(vocab_size=8, context_tokens=512, eos_token_ids=frozenset({1}))
    assert refusal(request_of(logprobs=True, top_logprobs=9), small) == "sampling_params.top_logprobs"
    every = {"stop_token_ids": list(range(8)), "min_new_tokens": 1}
    assert refusal(request_of(**every), small) == "sampling_params.min_new_tokens"
    # No draft is there to be bounded.
    assert parse(speculating(enabled=True), small).max_draft_tokens is None
    assert refusal(speculating(max_draft_tokens=1), small) == "speculation.max_draft_tokens"
    few = replace(LIMITS, max_samples=2)
    assert len(parse_all(request_of(n=2), few).samples) == 2
    assert refusal(request_of(n=3), few) == "sampling_params.n"


def test_a_salt_is_the_same_for_all_samples_and_part_of_the_request() -> None:
    request, salted = request_of(n=3, seed=1), request_of(n=3, seed=1)
    salted.cache_salt = "t" * 128
    assert [spec.cache_salt for spec in parse_all(salted).samples] == ["t" * 128] * 3
    assert parse_all(request).digest != parse_all(salted).digest
    salted.cache_salt += "t"
    assert refusal(salted) == "cache_salt"


def test_a_model_without_a_template() -> None:
    tokenizer = WordTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InvalidArgumentError, match="the model has no chat template") as caught:
        parse_request(conversation(("user", "1")), LIMITS, tokenizer)
    assert caught.value.field == "messages"
