"""Finds stop strings in text that comes in parts; holds back text that may become one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopMatcher:
    """Finds the stop strings of one sample.

    The stop string that is complete first ends the text, the longest if several are complete at once: so the end
    depends on the text alone, not on its parts.
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
        """True if no stop string is under way or begins in the text; then it need not be pushed."""
        return not self._held and self.matched is None and self._first.search(text) is None

    def push(self, text: str, *, counts: bool = True) -> str:
        """Adds text and returns the text that is certain to stay; after the end, nothing.

        A stop string that is complete with text that does not count (`counts`) is ignored.
        """
        if self.matched is not None:
            return ""
        if self.passes(text):
            return text
        known = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # All patterns advance before one is chosen.
            complete = [pattern.text for pattern in self._patterns if pattern.advance(character)]
            if complete and counts:
                self.matched, self._held = max(complete, key=len), ""
                return known[: end - len(self.matched)]
        certain = len(known) - max((pattern.num_matching for pattern in self._patterns), default=0)
        self._held = known[certain:]
        return known[:certain]

    def finish(self) -> str:
        """Returns the text held back: there is no more text to complete a stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Matches one string character by character (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matching = 0
        """Length of the string's longest proper prefix that ends the text seen so far."""
        self._fallback = _borders(text)

    def advance(self, character: str) -> bool:
        """Returns True if the string is complete with this character."""
        while self.num_matching and self.text[self.num_matching] != character:
            self.num_matching = self._fallback[self.num_matching - 1]
        self.num_matching += self.text[self.num_matching] == character
        if self.num_matching < len(self.text):
            return False
        self.num_matching = self._fallback[-1]
        return True


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        length += text[end] == text[length]
        borders[end] = length
    return borders
