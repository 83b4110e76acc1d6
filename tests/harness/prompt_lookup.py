"""Prompt lookup in plain Python, for tests of the drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def continued(tokens: Sequence[int], num_tokens: int, shortest: int, longest: int) -> list[int]:
    """The next tokens, as the last earlier occurrence of the longest suffix has them; else the last token again."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in reversed(range(len(tokens) - length)):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                text = list(tokens)
                for place in range(start + length, start + length + num_tokens):
                    text.append(text[place])
                return text[len(tokens) :]
    return [tokens[-1]] * num_tokens


def num_steps(
    prompt: Sequence[int], output: Sequence[int], num_tokens: int, shortest: int, longest: int, most: int | None = None
) -> int:
    """The decode steps that an output takes with these drafts. `most`: draft tokens that are accepted in a step."""
    done, count = 1, 0
    while done < len(output):
        guesses = continued((*prompt, *output[:done]), num_tokens, shortest, longest)[:most]
        rest = output[done:]
        is_right = [guess == token for guess, token in zip(guesses, rest, strict=False)]
        done += 1 + (is_right.index(False) if False in is_right else len(is_right))
        count += 1
    return count
