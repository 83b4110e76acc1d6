"""Muon for matrices, AdamW for the embedding, an output of its own and the norms, and the learning rate's course."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """``weight_decay`` is decoupled; norms have none. ``clip`` bounds the gradient's norm."""

    matrix_rate: float = 4e-3
    embedding_rate: float = 4e-3
    weight_decay: float = 0.1
    clip: float = 1.0


class Optimizer:
    """Both optimizers behind one ``step(factor)``, ``factor`` scaling the learning rates."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._parameters = list(model.parameters())
        tables = ("embed_tokens.weight", "lm_head.weight")
        matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and not name.endswith(tables)]
        embeddings = [w for name, w in model.named_parameters() if name.endswith(tables)]
        norms = [w for w in self._parameters if w.ndim == 1]
        muon = torch.optim.Muon(
            matrices,
            lr=config.matrix_rate,
            weight_decay=config.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
        adam = torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            lr=config.embedding_rate,
            betas=(0.9, 0.95),
        )
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (muon, adam)
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._clip = config.clip

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of both."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes what ``state_dict`` returned."""
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def step(self, factor: float) -> None:
        """Apply the gradients and clear them."""
        torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Progress of a run, 0 to 1: by steps, or by the clock if that is further."""

    steps: int
    minutes: float

    def progress(self, step: int, seconds: float) -> float:
        """Share of the run that is done before step number ``step``, after so many seconds."""
        return min(1.0, max(step / self.steps, seconds / (60 * self.minutes)))

    @staticmethod
    def rate_factor(progress: float, warmup: float = 0.02) -> float:
        """Linear warm-up, then linear decay to zero."""
        return min(progress / warmup + 0.01, 1.0) if progress < warmup else (1.0 - progress) / (1.0 - warmup)
