"""Prompt lookup in plain Python, for tests of the drafter."""

from __future__ import annotations

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


def match_length(tokens: Sequence[int], shortest: int, longest: int) -> int:
    """The tokens of the longest suffix that stood in the sequence before; 0 without one."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        if any(tokens[start : start + length] == tokens[-length:] for start in range(len(tokens) - length)):
            return length
    return 0


class PlainSuffixCache:
    """The reference of `SuffixCache`: a list of all tokens that were ever recorded."""

    def __init__(self, size: int) -> None:
        """`size`: the last tokens that count."""
        self._size = size
        self._entries: list[tuple[tuple[int, ...], int, object]] = []
        """The text before a token, the token, and what it is one piece with."""

    def record(self, text: Sequence[int], num_new: int, piece: object) -> None:
        """Takes in the last tokens of a text. `piece`: the same where they follow those before without a gap."""
        for place in range(len(text) - num_new, len(text)):
            self._entries.append((tuple(text[:place]), text[place], piece))

    def continued(self, tokens: Sequence[int], num_tokens: int, shortest: int, longest: int) -> list[int]:
        """The next tokens, from the own text, or from a longer match in the others."""
        own, entries = match_length(tokens, shortest, longest), self._entries[-self._size :]
        for length in range(min(longest, len(tokens)), max(own, shortest - 1), -1):
            suffix = tuple(tokens[-length:])
            for place, (before, _, piece) in reversed(list(enumerate(entries))):
                if before[-length:] == suffix:
                    follows = [token for _, token, other in entries[place:] if other is piece]
                    return [follows[index % len(follows)] for index in range(num_tokens)]
        return continued(tokens, num_tokens, shortest, longest)
