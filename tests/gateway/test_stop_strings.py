"""Text is cut where the first stop string is complete, however it comes in parts, and none of it is taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.gateway.text import StopMatcher
from tests.harness.sampling import examples

# Few letters, so that strings overlap each other and themselves.
TEXTS = st.text(alphabet="ab\u00e9", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str], first_end: int = 0) -> tuple[str, str | None]:
    """The text up to the first stop string that ends at `first_end` or later, and that string: looks everywhere."""
    for end in range(max(1, first_end), len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def sent(parts: list[str], stops: list[str], num_ignored: int = 0) -> tuple[list[str], str | None]:
    """Returns the texts for each part and at the end, and the match; one that ends in the ignored parts is skipped."""
    matcher = StopMatcher(stops)
    texts = [matcher.push(part, counts=number >= num_ignored) for number, part in enumerate(parts)]
    return [*texts, matcher.finish()], matcher.matched


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS)
def test_the_text_is_cut_at_the_first_match_in_any_parts(parts: list[str], stops: list[str]) -> None:
    texts, matched = sent(parts, stops)
    assert ("".join(texts), matched) == reference("".join(parts), stops)


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS, st.integers(0, 8))
def test_a_stop_string_that_is_complete_too_early_does_not_count(
    parts: list[str], stops: list[str], num_ignored: int
) -> None:
    texts, matched = sent(parts, stops, num_ignored)
    first_end = len("".join(parts[:num_ignored])) + 1
    assert ("".join(texts), matched) == reference("".join(parts), stops, first_end)


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS, TEXTS)
def test_nothing_is_held_back_for_longer_than_it_must(parts: list[str], stops: list[str], rest: str) -> None:
    """At every moment, what has not come out is the beginning of a stop string, the longest at the end of the text."""
    matcher, seen, came = StopMatcher(stops), "", ""
    for part in parts:
        seen += part
        came += matcher.push(part)
        if matcher.matched is not None:
            return
        beginnings = [seen[start:] for start in range(len(seen) + 1)]
        held = next(
            text for text in beginnings if any(stop.startswith(text) and stop != text for stop in stops) or not text
        )
        assert came + held == seen


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(TEXTS, max_size=8), STOPS)
def test_text_that_passes_need_not_be_pushed(parts: list[str], stops: list[str]) -> None:
    matcher, text = StopMatcher(stops), ""
    for part in parts:
        text += part if matcher.passes(part) else matcher.push(part)
    text += matcher.finish()
    assert (text, matcher.matched) == reference("".join(parts), stops)


def test_the_end_is_the_first_to_be_complete_and_then_the_longest() -> None:
    assert sent(["abcd"], ["abcd", "bc"]) == (["a", ""], "bc")
    assert sent(["a", "b", "c", "d"], ["abcd", "bc"]) == (["", "", "a", "", ""], "bc")
    assert sent(["xabc"], ["c", "abc", "bc"]) == (["x", ""], "abc")


def test_nothing_comes_after_the_end() -> None:
    assert sent(["ab", "STOP and", "more"], ["STOP"]) == (["ab", "", "", ""], "STOP")


@pytest.mark.parametrize("stop", ["]", "^", "\\", "-", ".", "[a"])
def test_punctuation_stands_for_itself(stop: str) -> None:
    assert sent(["ab", f"c{stop}d"], ["z", stop, "!"]) == (["ab", "c", ""], stop)


def test_without_stop_strings_text_passes() -> None:
    assert sent(["ab", "c"], []) == (["ab", "c", ""], None)
