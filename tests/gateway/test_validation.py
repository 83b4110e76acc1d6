"""Requests that cannot be honoured, each refused by the name of the field."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.sequence import SamplingParams
from slipstream.gateway.request import JOB_ID, SEED_STEP, RequestLimits, digest_of, parse_request
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from slipstream.common.wire.sequence import SequenceSpec
    from slipstream.gateway.request import CheckedRequest

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


def request_of(ids: Any = (5, 6), *, job_id: str = "", **params: Any) -> generation_pb2.GenerateRequest:
    """A request with a prompt of token ids."""
    return generation_pb2.GenerateRequest(job_id=job_id, input_ids={"ids": ids}, sampling_params=params)


def refusal(request: generation_pb2.GenerateRequest, limits: RequestLimits = LIMITS) -> str:
    """The name of the field that a request is refused for."""
    with pytest.raises(InvalidArgumentError) as caught:
        parse(request, limits)
    return caught.value.field


def test_everything_that_is_asked_for_is_in_the_job() -> None:
    request = request_of(
        (5, 6),
        job_id="a-Z_0.9:x",
        max_new_tokens=510,
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.25,
        seed=2**64 - 1,
        stop_token_ids=[9, 9, 10],
    )
    spec = parse(request)
    assert spec.job_id == "a-Z_0.9:x"
    assert spec.prompt == (5, 6)
    assert spec.max_new_tokens == 510
    assert spec.sampling == SamplingParams(temperature=0.5, top_k=40, top_p=0.75, min_p=0.25, seed=2**64 - 1)
    assert spec.stop_token_ids == {1, 2, 9, 10}


def test_defaults() -> None:
    spec = parse(request_of())
    assert JOB_ID.fullmatch(spec.job_id)
    assert spec.max_new_tokens == 256
    assert spec.sampling == SamplingParams(seed=spec.sampling.seed)
    assert spec.stop_token_ids == {1, 2}


def test_an_unset_job_id_or_seed_is_drawn_anew_and_a_set_one_is_not() -> None:
    specs = [parse(request_of()) for _ in range(3)]
    assert len({spec.job_id for spec in specs}) == 3
    assert len({spec.sampling.seed for spec in specs}) == 3
    assert parse(request_of(seed=0)).sampling.seed == 0


def test_text_is_tokenised_as_the_tokenizer_does_of_its_own_accord() -> None:
    assert parse(generation_pb2.GenerateRequest(text="3 4")).prompt == (7, 3, 4)


def test_the_default_length_fills_what_room_there_is() -> None:
    assert parse(request_of([5] * 511)).max_new_tokens == 1
    assert parse(request_of([5] * 256)).max_new_tokens == 256
    assert parse(request_of([5] * 257)).max_new_tokens == 255


def test_the_model_s_end_is_ignored_on_request() -> None:
    assert parse(request_of(ignore_eos=True)).stop_token_ids == set()
    assert parse(request_of(ignore_eos=True, stop_token_ids=[9])).stop_token_ids == {9}


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


def test_to_ignore_a_token_and_to_stop_at_it_is_a_contradiction() -> None:
    request = request_of(ignore_eos=True, stop_token_ids=[9, 2])
    assert refusal(request) == "sampling_params.stop_token_ids[1]"
    assert parse(request_of(stop_token_ids=[2])).stop_token_ids == {1, 2}


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5, 101.0])
def test_numbers_out_of_range(name: str, value: float) -> None:
    assert refusal(request_of(**{name: value})) == f"sampling_params.{name}"


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.0), ("top_k", 2**31), ("top_k", 2**32 - 1)])
def test_more_numbers_out_of_range(name: str, value: float) -> None:
    assert refusal(request_of(**{name: value})) == f"sampling_params.{name}"


@pytest.mark.parametrize("value", [0, 511, 512, 2**31, 2**32 - 1])
def test_a_length_that_is_none_or_does_not_fit(value: int) -> None:
    assert refusal(request_of((5, 6), max_new_tokens=value)) == "sampling_params.max_new_tokens"


def test_no_prompt() -> None:
    assert refusal(generation_pb2.GenerateRequest()) == "prompt"
    assert refusal(generation_pb2.GenerateRequest(sampling_params={"seed": 1})) == "prompt"


def test_an_empty_prompt() -> None:
    assert refusal(generation_pb2.GenerateRequest(text="")) == "text"
    assert refusal(request_of([])) == "input_ids.ids"


def test_a_text_without_tokens() -> None:
    class Nothing(WordTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(InvalidArgumentError, match="no tokens") as caught:
        parse_request(generation_pb2.GenerateRequest(text=" "), LIMITS, Nothing())
    assert caught.value.field == "text"


def test_tokens_outside_the_vocabulary() -> None:
    assert refusal(request_of([999, 5, 5, 1000, 1001])) == "input_ids.ids[3]"
    assert refusal(request_of([2**32 - 1])) == "input_ids.ids[0]"
    assert refusal(request_of(stop_token_ids=[999, 1000])) == "sampling_params.stop_token_ids[1]"


def test_a_text_of_tokens_that_the_model_does_not_have() -> None:
    assert refusal(generation_pb2.GenerateRequest(text="3 1000")) == "text"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    class Unused(WordTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("tokenised")

    limits = replace(LIMITS, max_characters=100)
    messages = [{"role": "user", "content": "x" * 60}, {"role": "user", "content": "x" * 41}]
    for field, request in (
        ("text", generation_pb2.GenerateRequest(text="x" * 101)),
        ("messages", generation_pb2.GenerateRequest(messages={"items": messages})),
    ):
        with pytest.raises(InvalidArgumentError, match=r"101 characters.*at most 100") as caught:
            parse_request(request, limits, Unused())
        assert caught.value.field == field


def test_a_prompt_that_fills_the_context() -> None:
    assert refusal(request_of([5] * 512)) == "input_ids.ids"
    assert refusal(generation_pb2.GenerateRequest(text="5 " * 511)) == "text"


@pytest.mark.parametrize("job_id", ["a b", "ä", "a\n", "a" * 129, "../a", "a/b", "٣"])
def test_a_bad_job_id(job_id: str) -> None:
    assert refusal(request_of(job_id=job_id)) == "job_id"


def test_unknown_fields() -> None:
    unknown = b"\xf8\x07\x01"
    assert refusal(generation_pb2.GenerateRequest.FromString(request_of().SerializeToString() + unknown)) == "127"
    params = generation_pb2.SamplingParams.FromString(unknown)
    request = generation_pb2.GenerateRequest(text="5", sampling_params=params)
    assert refusal(request) == "sampling_params.127"


def test_the_message_says_what_was_given_and_what_is_accepted() -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape("got 600, accepted: 1 to 510: the context has 512")):
        parse(request_of((5, 6), max_new_tokens=600))


def test_all_options_of_a_request_are_in_the_job() -> None:
    request = request_of(
        (5, 6),
        max_new_tokens=9,
        min_new_tokens=3,
        stop=["b", "\n\n"],
        repetition_penalty=1.5,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias={9: -100, 3: 1.5},
        logprobs=True,
        top_logprobs=20,
        stop_token_ids=[9],
        seed=1,
    )
    request.speculation.max_draft_tokens = 4
    request.priority = -2
    checked = parse_all(request)
    assert (checked.stop, checked.min_new_tokens) == (("b", "\n\n"), 3)
    (spec,) = checked.samples
    assert spec.sampling == SamplingParams(
        repetition_penalty=1.5,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias=((3, 1.5), (9, -100.0)),
        seed=1,
        # No token that ends the output is the first, second or third behind the two of the prompt.
        masked_before=5,
        masked_token_ids=(1, 2, 9),
    )
    assert (spec.top_logprobs, spec.max_draft_tokens, spec.priority) == (20, 4, -2)


def test_options_that_are_not_set_are_off() -> None:
    checked = parse_all(request_of())
    (spec,) = checked.samples
    assert (checked.stop, checked.min_new_tokens) == ((), 0)
    assert (spec.top_logprobs, spec.max_draft_tokens, spec.priority) == (None, None, 0)
    assert not spec.sampling.adjusts_logits
    assert parse(request_of(logprobs=True)).top_logprobs == 0
    # Nothing ends the output, so there is nothing to mask.
    assert not parse(request_of(min_new_tokens=3, ignore_eos=True)).sampling.adjusts_logits


def test_samples_differ_in_their_seeds() -> None:
    specs = parse_all(request_of((5, 6), n=16, seed=2**64 - 2)).samples
    assert [spec.sampling.seed for spec in specs] == [(2**64 - 2 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(16)]
    assert len({spec.sampling.seed for spec in specs}) == 16
    assert {replace(spec, sampling=replace(spec.sampling, seed=0)) for spec in specs} == {
        replace(specs[0], sampling=replace(specs[0].sampling, seed=0))
    }
    drawn = [spec.sampling.seed for spec in parse_all(request_of(n=2)).samples]
    assert (drawn[1] - drawn[0]) % 2**64 == SEED_STEP


@pytest.mark.parametrize(
    ("field", "params"),
    [
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
    ],
)
def test_more_that_cannot_be_honoured(field: str, params: dict[str, Any]) -> None:
    assert refusal(request_of(**params)) == f"sampling_params.{field}"


def test_as_many_stop_tokens_as_may_be_listed() -> None:
    assert len(parse_all(request_of(ignore_eos=True, stop_token_ids=range(3, 259))).samples[0].stop_token_ids) == 256


def test_the_longest_stop_string_is_counted_in_characters() -> None:
    assert parse_all(request_of(stop=["你" * 256])).stop == ("你" * 256,)


def test_a_small_vocabulary_bounds_more() -> None:
    small = RequestLimits(vocab_size=8, context_tokens=512, eos_token_ids=frozenset({1}))
    assert refusal(request_of(logprobs=True, top_logprobs=9), small) == "sampling_params.top_logprobs"
    every = {"stop_token_ids": list(range(8)), "min_new_tokens": 1}
    assert refusal(request_of(**every), small) == "sampling_params.min_new_tokens"


def test_more_samples_than_can_wait() -> None:
    limits = replace(LIMITS, max_samples=2)
    assert len(parse_all(request_of(n=2), limits).samples) == 2
    assert refusal(request_of(n=3), limits) == "sampling_params.n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"enabled": True}, None),
        ({"enabled": False}, 0),
        ({"max_draft_tokens": 0}, 0),
        ({"max_draft_tokens": 3}, 3),
        ({"enabled": True, "max_draft_tokens": 4}, 4),
        ({"enabled": False, "max_draft_tokens": 0}, 0),
    ],
)
def test_speculation_is_bounded(given: dict[str, Any], expected: int | None) -> None:
    request = request_of()
    request.speculation.CopyFrom(generation_pb2.Speculation(**given))
    assert parse(request).max_draft_tokens == expected


@pytest.mark.parametrize(
    "given",
    [{"max_draft_tokens": 5}, {"enabled": False, "max_draft_tokens": 1}, {"enabled": True, "max_draft_tokens": 0}],
)
def test_speculation_that_cannot_be(given: dict[str, Any]) -> None:
    request = request_of()
    request.speculation.CopyFrom(generation_pb2.Speculation(**given))
    assert refusal(request) == "speculation.max_draft_tokens"


def test_a_server_without_a_draft_has_nothing_to_bound() -> None:
    limits = replace(LIMITS, num_draft_tokens=0)
    request = request_of()
    request.speculation.enabled = True
    assert parse_all(request, limits).samples[0].max_draft_tokens is None
    request.speculation.max_draft_tokens = 1
    assert refusal(request, limits) == "speculation.max_draft_tokens"


def test_a_salt_is_the_same_for_all_samples_and_part_of_the_request() -> None:
    request, salted = request_of(n=3, seed=1), request_of(n=3, seed=1)
    salted.cache_salt = "t" * 128
    assert [spec.cache_salt for spec in parse_all(salted).samples] == ["t" * 128] * 3
    assert parse_all(request).digest != parse_all(salted).digest
    assert parse(request).cache_salt == ""
    salted.cache_salt += "t"
    assert refusal(salted) == "cache_salt"


def conversation(*messages: tuple[str, str]) -> generation_pb2.GenerateRequest:
    """A request with messages: roles, and what was said."""
    items = [{"role": role, "content": content} for role, content in messages]
    return generation_pb2.GenerateRequest(messages={"items": items})


def test_a_conversation_goes_through_the_template() -> None:
    request = conversation(("system", "1"), ("user", "2"), ("assistant", ""), ("user", "3"))
    # And nothing is added to what the template writes.
    assert parse(request).prompt == (10, 1, 11, 2, 12, 11, 3, 12)


def test_conversations_that_cannot_be_honoured() -> None:
    assert refusal(conversation()) == "messages.items"
    assert refusal(conversation(("user", "1"), ("judge", "2"))) == "messages.items[1].role"
    assert refusal(conversation(("", "1"))) == "messages.items[0].role"
    assert refusal(conversation(("user", "1000"))) == "messages"
    assert refusal(conversation(("user", "5 " * 512))) == "messages"


def test_a_model_without_a_template() -> None:
    tokenizer = WordTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InvalidArgumentError, match="the model has no chat template") as caught:
        parse_request(conversation(("user", "1")), LIMITS, tokenizer)
    assert caught.value.field == "messages"
