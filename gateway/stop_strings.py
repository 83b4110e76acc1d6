"""Stop strings in text that comes in parts: what may still become one is held back, so that no text is taken back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopMatcher:
    """Looks for the stop strings of one sample.

    The first to be complete ends the text, the longest of those that are complete at once: so the end depends on the
    text alone, and not on how it came in parts.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops`: none of them empty."""
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        firsts = "".join(re.escape(pattern.text[0]) for pattern in self._patterns)
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def passes(self, text: str) -> bool:
        """Whether no stop string has begun before a text or begins in it; then it need not be pushed."""
        return not self._held and self.matched is None and self._first.search(text) is None

    def push(self, text: str, *, counts: bool = True) -> str:
        """Adds text, and gives what is certain to stay by now; after the end, nothing.

        What is complete with text that does not count ends nothing.
        """
        if self.matched is not None:
            return ""
        if self.passes(text):
            return text
        known = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # No pattern may be left behind, so all of them go on before one is chosen.
            complete = [pattern.text for pattern in self._patterns if pattern.advance(character)]
            if complete and counts:
                self.matched, self._held = max(complete, key=len), ""
                return known[: end - len(self.matched)]
        certain = len(known) - max((pattern.num_matching for pattern in self._patterns), default=0)
        self._held = known[certain:]
        return known[:certain]

    def finish(self) -> str:
        """What is held back: there is no more text that it could be the beginning of."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One string, sought character by character (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matching = 0
        """Characters at the end of what was seen that are the beginning of the string; never all of it."""
        self._fallback = _borders(text)

    def advance(self, character: str) -> bool:
        """Whether the string is complete with this character."""
        while self.num_matching and self.text[self.num_matching] != character:
            self.num_matching = self._fallback[self.num_matching - 1]
        self.num_matching += self.text[self.num_matching] == character
        if self.num_matching < len(self.text):
            return False
        self.num_matching = self._fallback[-1]
        return True


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is its suffix, too."""
    borders = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        length += text[end] == text[length]
        borders[end] = length
    return borders
