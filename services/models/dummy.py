"""Random weights in place of a checkpoint's, for measurements: the time of a step does not depend on their values."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

SEED = 0


def fill_with_noise(module: nn.Module, *, seed: int = SEED, on_progress: Callable[[float], None] | None = None) -> None:
    """Fills a model's parameters where they are, in place.

    Matrices ([out_features, in_features]) get a standard deviation of 1 / sqrt(in_features), so that activations keep
    their size from layer to layer; norms are ones, and biases zeros.
    """
    parameters = dict(module.named_parameters())
    total = sum(prod(parameter.shape) for parameter in parameters.values())
    done = 0
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.device not in generators:
                generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generators[parameter.device])
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            done += prod(parameter.shape)
            if on_progress is not None:
                on_progress(done / total)
