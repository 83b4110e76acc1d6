"""What became of the drafts of one step."""

from __future__ import annotations


class DraftTally:
    """Counts drafts, one a request."""

    __slots__ = ("by_accepted", "most_drafted", "num_draft_tokens", "num_drafts")

    def __init__(self, num_draft_tokens: int) -> None:
        """`num_draft_tokens`: K, which no draft has more than."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        """Tokens that could be accepted, of all of them."""
        self.most_drafted = 0
        """Of one of them."""
        self.by_accepted = [0] * (num_draft_tokens + 1)
        """How many had none of their tokens accepted, one, and so on."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One draft of which `num_accepted` tokens were accepted, of at least one."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        if num_drafted > self.most_drafted:
            self.most_drafted = num_drafted
        self.by_accepted[num_accepted] += 1

    def accepted_per_position(self) -> list[int]:
        """[K]: drafts whose token at each place was accepted."""
        reached, total = [], 0
        for count in reversed(self.by_accepted[1:]):
            total += count
            reached.append(total)
        return reached[::-1]
