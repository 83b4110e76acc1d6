"""A detokenizer that fails, in place of one that has a mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.gateway.servicer import ServedModel


class Unspellable:
    """Knows no token."""

    def push(self, token_id: int) -> Never:
        """See `Detokenizer`."""
        raise OverflowError(f"no token has the number {token_id}")

    def push_all(self, token_ids: Sequence[int]) -> Never:
        """See `Detokenizer`."""
        self.push(token_ids[0])

    def finish(self) -> str:
        """See `Detokenizer`."""
        return ""


def spell_first_never(model: ServedModel) -> None:
    """Gives the next sample that comes to `model` a detokenizer that fails; those behind it have their own."""
    made, make = iter([Unspellable()]), model.vocabulary.new_detokenizer
    model.vocabulary.new_detokenizer = lambda: next(made, None) or make()  # type: ignore[method-assign]
