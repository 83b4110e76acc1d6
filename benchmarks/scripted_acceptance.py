"""Makes a `transformers` pair of models agree as often as it is told, at the price of their real forwards.

Random weights agree never, and two systems are compared fairly only where drafts are accepted alike. So both models
compute, and then the logits that the next tokens are taken from are replaced by those of a script.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_TOKEN = 1000
NUM_TOKENS = 97
WRONG_TOKEN = 17


@dataclass(frozen=True, slots=True)
class Script:
    """What the target says at each position, and where the assistant guesses it."""

    tokens: torch.Tensor
    """[positions] int64: the target's."""
    guesses: torch.Tensor
    """[positions] int64: the assistant's."""

    @classmethod
    def draw(cls, num_positions: int, rate: float, *, seed: int, device: torch.device) -> Script:
        """Guesses are right with probability `rate`, each by itself."""
        generator = torch.Generator().manual_seed(seed)
        tokens = FIRST_TOKEN + torch.arange(num_positions) % NUM_TOKENS
        is_right = torch.rand(num_positions, generator=generator) < rate
        return cls(tokens.to(device), torch.where(is_right, tokens, WRONG_TOKEN).to(device))


def follow(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """Makes a causal model say `tokens[p]` at position p, whatever it computed; returns what undoes it."""

    def force(_model: Any, _args: Any, arguments: dict[str, Any], output: Any) -> None:
        num_seen, width = arguments["attention_mask"].shape[1], output.logits.shape[1]
        # The logits of a row's last input are for the position behind everything that was seen.
        said = tokens[num_seen - width + 1 : num_seen + 1]
        output.logits.fill_(0.0)
        output.logits.scatter_(2, said[None, :, None], 100.0)

    handle = model.register_forward_hook(force, with_kwargs=True)
    removed: Callable[[], None] = handle.remove
    return removed
