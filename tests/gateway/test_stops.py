"""Stop strings: where an output ends, whatever a step has at once, and that no text is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.client import AsyncClient
from slipstream.common.errors import UnavailableError
from slipstream.common.wire.job import FinishReason, JobState, OutputChunk, TokenLogprobs
from slipstream.gateway.model import ServedModel
from slipstream.gateway.sample import Sample
from slipstream.gateway.text import StopMatcher, Vocabulary
from tests.harness.example_states import TOKENS_PER_STEP
from tests.harness.generation_server import GenerationServer, collect, generation_server, state_of, text_of, tokens_of
from tests.harness.samples import read, sample_of
from tests.harness.sampling import examples
from tests.harness.scripted_scheduler import EOS_ID
from tests.harness.tokenizers_by_kind import make_tokenizer

MAX_ID = 345


def pieces(kind: str, ids: Sequence[int]) -> list[str]:
    """Returns the text that becomes certain with each token; the last token's includes the rest."""
    detokenizer = Vocabulary(make_tokenizer(kind)).new_detokenizer()
    texts = [detokenizer.push(token) for token in ids]
    return [*texts[:-1], texts[-1] + detokenizer.finish()] if texts else []


def reference(texts: list[str], stops: list[str], num_ignored: int) -> tuple[str, int, str | None]:
    """The text, the number of tokens, and the stop string, by looking everywhere at once."""
    whole, first_end = "".join(texts), len("".join(texts[:num_ignored])) + 1
    for end in range(first_end, len(whole) + 1):
        complete = [stop for stop in stops if whole[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            num_tokens = next(n for n in range(len(texts) + 1) if len("".join(texts[:n])) >= end)
            return whole[: end - len(stop)], num_tokens, stop
    return whole, len(texts), None


@pytest.mark.parametrize("kind", ["byte level", "llama", "suffix"])
def test_an_output_ends_where_the_whole_text_would(kind: str) -> None:
    """In any steps, read at any time from any token: every reader has the same text, and none of it is taken back."""

    @settings(max_examples=examples(150), deadline=None)
    @given(
        ids=st.lists(st.integers(0, MAX_ID), min_size=1, max_size=24),
        cuts=st.lists(st.integers(0, 24), max_size=6),
        marks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=3),
        num_ignored=st.integers(0, 6),
        reads=st.lists(st.booleans(), min_size=8, max_size=8),
    )
    def check(
        ids: list[int], cuts: list[int], marks: list[tuple[int, int]], num_ignored: int, reads: list[bool]
    ) -> None:
        texts = pieces(kind, ids)
        whole = "".join(texts)
        # Strings that are there, as a rule.
        stops = [stop for start, length in marks if (stop := whole[start : start + length])] or ["never there"]
        text, num_tokens, stop = reference(texts, stops, num_ignored)
        output = sample_of(kind, stops, min_new_tokens=num_ignored, top_logprobs=0)
        steps = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
        seen: list[OutputChunk] = []
        for (start, end), has_reader in zip(pairwise(steps), reads, strict=False):
            add(output, ids[start:end], FinishReason.LENGTH if end == len(ids) else None)
            if has_reader and (chunk := read(output, len(tokens_of(seen)))) is not None:
                seen.append(chunk)
        if output.finish_reason is None:
            # The loop has been told, and has brought one more step by then.
            add(output, [5, 6])
            add(output, [], FinishReason.ABORT)
        if not seen or seen[-1].finish_reason is None:
            last = read(output, len(tokens_of(seen)))
            assert last is not None
            seen.append(last)
        assert (text_of(seen), tokens_of(seen)) == (text, ids[:num_tokens])
        assert (seen[-1].matched_stop, seen[-1].finish_reason) == (stop, "stop" if stop else "length")
        assert [logprobs.logprob for chunk in seen for logprobs in chunk.logprobs] == [-i for i in ids[:num_tokens]]
        lengths = [length for chunk in seen for length in chunk.text_lengths]
        assert sum(lengths) == len(text)
        for offset in range(num_tokens + 1):
            chunk = read(output, offset)
            assert chunk is not None
            assert (chunk.text, chunk.token_ids) == (text[sum(lengths[:offset]) :], tuple(ids[offset:num_tokens]))

    check()


def add(output: Sample, ids: list[int], reason: FinishReason | None = None) -> None:
    """Adds the output of a step, with a logprob for each token."""
    output.add(ids, 0, tuple(TokenLogprobs(-token) for token in ids), reason)


def test_the_rest_of_a_cancelled_job_may_be_a_stop_string() -> None:
    half = next(t for t in range(MAX_ID) if Vocabulary(make_tokenizer("byte level")).bytes_of(t) == "你".encode()[:1])
    for stops, expected in ((["\ufffd"], ("", "stop", "\ufffd")), (["\ufffd!"], ("\ufffd", "abort", None))):
        output = sample_of("byte level", stops, top_logprobs=0)
        add(output, [half])
        add(output, [], FinishReason.ABORT)
        chunk = read(output, 0)
        assert chunk is not None
        assert (chunk.text, chunk.finish_reason, chunk.matched_stop) == expected


async def test_a_stop_string_ends_the_job(server: GenerationServer, client: AsyncClient) -> None:
    """Across tokens, and in the middle of a step: the fake loop brings the prompt's tokens, three at once."""
    prompt = [server.model.tokenizer.encode(character)[0] for character in "abcdefgh"]
    server.loop.pause_tokens = 2 * TOKENS_PER_STEP  # by itself the job never ends
    chunks = await collect(client.generate(prompt, job_id="mine", stop=["de", "never"], max_new_tokens=1000))
    assert (text_of(chunks), tokens_of(chunks)) == ("abc", prompt[:5])
    last = chunks[-1]
    assert (last.finish_reason, last.matched_stop, last.job_usage) == ("stop", "de", last.usage)
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    ended = await client.get_job("mine")
    assert (ended.state, ended.num_tokens, ended.finish_reason) == (JobState.ENDED, 5, "stop")
    (sample,) = ended.samples
    assert (sample.matched_stop, sample.usage) == ("de", last.usage)
    assert [job.spec.job_id for job in server.loop.cancelled] == ["mine"]
    assert server.metric("requests_total", outcome="stop") == 1
    assert server.metric("requests_total", outcome="abort") == 0
    assert server.metric("generation_tokens_total") == 5
    again = await collect(client.watch_job("mine", 2))
    assert (text_of(again), again[-1].matched_stop) == ("c", "de")


async def test_text_that_may_become_a_stop_string_waits(server: GenerationServer, client: AsyncClient) -> None:
    a, b, c = (server.model.tokenizer.encode(character)[0] for character in "abc")
    server.loop.pause_tokens = TOKENS_PER_STEP
    chunks = client.generate([a, b, c, a, a], stop=["bcb"], max_new_tokens=5)
    first = await anext(chunks)
    assert (first.token_ids, first.text, first.text_lengths) == ((a, b, c), "a", (1, 0, 0))
    server.loop.pause_tokens = None
    rest = await collect(chunks)
    assert (text_of(rest), rest[-1].finish_reason, rest[-1].matched_stop) == ("bcaa", "length", None)
    assert [length for chunk in rest for length in chunk.text_lengths] == [3, 1]


async def test_text_that_is_held_back_comes_with_the_end(server: GenerationServer, client: AsyncClient) -> None:
    a, b = (server.model.tokenizer.encode(character)[0] for character in "ab")
    for stop_token_ids, expected in (([], "abab"), ([b], "a")):
        chunks = await collect(
            client.generate([a, b], stop=["ababx", "bx"], max_new_tokens=4, stop_token_ids=stop_token_ids)
        )
        assert text_of(chunks) == expected
        assert chunks[-1].matched_stop == (b if stop_token_ids else None)
    server.loop.pause_tokens = TOKENS_PER_STEP
    chunks_of_cancelled = client.generate([a, b], job_id="mine", stop=["abax"], max_new_tokens=9)
    assert (await anext(chunks_of_cancelled)).text == ""
    await client.cancel_job("mine")
    (last,) = await collect(chunks_of_cancelled)
    assert (last.text, last.finish_reason, last.matched_stop) == ("aba", "abort", None)


async def test_stop_strings_do_not_count_before_the_least_length(server: GenerationServer, client: AsyncClient) -> None:
    a, b = (server.model.tokenizer.encode(character)[0] for character in "ab")
    # "ab" is complete with the tokens 2, 4 and 6; of five tokens that do not count the last is an "a".
    chunks = await collect(client.generate([a, b], stop="ab", min_new_tokens=5, max_new_tokens=20))
    assert (text_of(chunks), tokens_of(chunks)) == ("abab", [a, b] * 3)
    assert chunks[-1].finish_reason == "stop"


async def test_a_stop_token_is_told(server: GenerationServer, client: AsyncClient) -> None:
    chunks = await collect(client.generate([5, 6, EOS_ID]))
    assert (chunks[-1].finish_reason, chunks[-1].matched_stop) == ("stop", EOS_ID)
    chunks = await collect(client.generate([5, 6], max_new_tokens=2))
    assert (chunks[-1].finish_reason, chunks[-1].matched_stop) == ("length", None)


@pytest.mark.parametrize("kind", ["byte level", "llama"])
async def test_the_name_of_a_special_token_and_the_tokenizers_own_end_stop(kind: str) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        tokenizer = server.model.tokenizer
        bos, eos = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
        # The model's own configuration names one token, whichever this tokenizer's is.
        assert server.model.limits.eos_token_ids == {EOS_ID, eos}
        for stop, token in (([], eos), (["never", "<s>"], bos)):
            chunks = await collect(client.generate([70, 71, token, 72], stop=stop))
            assert tokens_of(chunks) == [70, 71, token]
            assert (chunks[-1].finish_reason, chunks[-1].matched_stop) == ("stop", token)


async def test_a_token_beyond_the_models_vocabulary_ends_nothing(server: GenerationServer) -> None:
    limits = replace(server.model.limits, vocab_size=EOS_ID, eos_token_ids=frozenset())
    model = ServedModel(server.model.tokenizer, limits)
    assert (model.limits.eos_token_ids, model.limits.special_tokens) == (set(), {"<s>": 0})


async def test_the_first_watcher_of_a_job_that_has_ended(server: GenerationServer, client: AsyncClient) -> None:
    """Its stop string is found all the same."""
    prompt = [server.model.tokenizer.encode(character)[0] for character in "abcdefgh"]
    await client.create_job(prompt, job_id="mine", stop="gh", max_new_tokens=1000)
    ended = await state_of(client, "mine", JobState.ENDED)
    assert (ended.num_tokens, ended.finish_reason) == (8, "stop")
    assert text_of(await collect(client.watch_job("mine"))) == "abcdef"


async def test_a_job_that_has_stopped_does_not_fail(server: GenerationServer) -> None:
    """The workers may be lost before the loop knows of the end."""
    sample = sample_of("byte level", ["b"], top_logprobs=0)
    ids = server.model.tokenizer.encode("abc")
    logprobs = tuple(TokenLogprobs(-token) for token in ids)
    assert sample.add(ids, 0, logprobs, None, num_draft_tokens=0, published_ns=1), "the scheduler must end it"
    sample.end(None, UnavailableError("verify is gone"))
    assert (sample.error, sample.finish_reason, sample.matched_stop) == (None, "stop", "b")


TEXTS = st.text(alphabet="ab\u00e9", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), max_size=4)


@settings(max_examples=examples(1000), deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS, st.integers(0, 8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_the_text_is_cut_at_the_first_match_that_counts_in_any_parts(
    parts: list[str], stops: list[str], num_ignored: int, may_pass: list[bool]
) -> None:
    """Text that passes need not be pushed; a stop string that is complete too early does not count."""
    matcher, text = StopMatcher(stops), ""
    for number, (part, is_passed) in enumerate(zip(parts, may_pass, strict=False)):
        is_passed = is_passed and matcher.passes(part)
        text += part if is_passed else matcher.push(part, counts=number >= num_ignored)
    expected, _, matched = reference(parts, stops, num_ignored)
    assert (text + matcher.finish(), matcher.matched) == (expected, matched)


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS)
def test_nothing_is_held_back_for_longer_than_it_must(parts: list[str], stops: list[str]) -> None:
    """At every moment, what is held back is the beginning of a stop string, the longest at the end of the text."""
    matcher, seen, certain = StopMatcher(stops), "", ""
    for part in parts:
        seen += part
        certain += matcher.push(part)
        if matcher.matched is not None:
            return
        beginnings = [seen[start:] for start in range(len(seen) + 1)]
        held = next(
            text for text in beginnings if any(stop.startswith(text) and stop != text for stop in stops) or not text
        )
        assert certain + held == seen


@pytest.mark.parametrize(
    ("parts", "stops", "texts", "matched"),
    [
        # The first to be complete is the end, then the longest.
        (["abcd"], ["abcd", "bc"], ["a", ""], "bc"),
        (["a", "b", "c", "d"], ["abcd", "bc"], ["", "", "a", "", ""], "bc"),
        (["xabc"], ["c", "abc", "bc"], ["x", ""], "abc"),
        (["ab", "STOP and", "more"], ["STOP"], ["ab", "", "", ""], "STOP"),
        (["ab", "c"], [], ["ab", "c", ""], None),
        *((["ab", f"c{stop}d"], ["z", stop, "!"], ["ab", "c", ""], stop) for stop in ("]", "^", "\\", "-", ".", "[a")),
    ],
)
def test_examples(parts: list[str], stops: list[str], texts: list[str], matched: str | None) -> None:
    matcher = StopMatcher(stops)
    assert ([*map(matcher.push, parts), matcher.finish()], matcher.matched) == (texts, matched)
