"""A mixture of experts: a router takes some of a layer's gated MLPs for each token, and adds up what they make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.services.models.families import Scoring
from slipstream.services.models.linear import Linear, empty_parameter
from slipstream.services.models.packed_ints import PackedInts

if TYPE_CHECKING:
    from slipstream.services.models.experts_config import ExpertsConfig
    from slipstream.services.models.quantization import PackedWeights

_STEEPNESS = 1.702
"""Factor in the sigmoid of bounded gates."""
LEAST_SUM = 1e-20
"""Added to the sum of weights before they are divided by it."""
ByKernels = Callable[["Experts", torch.Tensor], torch.Tensor]
"""Does what `Experts` does: [N, hidden_size] to the same."""


class Experts(nn.Module):
    """The experts of a layer, without the shared one.

    Weights are stacked. On a CPU each expert multiplies its own rows, and a token's numbers do not depend on those
    beside it. On a GPU kernels do this for all experts at once, and the host reads nothing of the choice.
    """

    steepness = _STEEPNESS

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        packed: PackedWeights | None = None,
    ) -> None:
        """`packed`: the layout of weights that stay packed, which only kernels multiply."""
        super().__init__()
        self.config = config
        num_experts, width = config.num_experts, config.width

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return empty_parameter(*shape, device=device, dtype=dtype)

        has_biases, has_choice_bias = config.mixture.is_stacked, config.mixture.choice_bias is not None
        router_bias = parameter(num_experts, dtype=torch.float32) if has_biases else None
        self.router = Linear(parameter(num_experts, hidden_size, dtype=torch.float32), router_bias)
        self.choice_bias = parameter(num_experts, dtype=torch.float32) if has_choice_bias else None
        sizes = (2 * width, hidden_size), (hidden_size, width)
        self.gate_up, self.down = (None if packed is not None else parameter(num_experts, *size) for size in sizes)
        of_experts = partial(PackedInts, device=device, dtype=dtype, num_experts=num_experts)
        self.gate_up_ints, self.down_ints = (None if packed is None else of_experts(packed, *size) for size in sizes)
        self.gate_up_bias = parameter(num_experts, 2 * width) if has_biases else None
        self.down_bias = parameter(num_experts, hidden_size) if has_biases else None
        self.by_kernels: ByKernels | None = None
        """Set where kernels run the experts."""
        self._each: list[tuple[Linear, Linear]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] to the same."""
        if self.by_kernels is not None:
            return self.by_kernels(self, x)
        chosen, weights = self.route(x)
        by_choice = self._by_expert(x, chosen)
        return (by_choice.view(*chosen.shape, -1) * weights[..., None].to(x.dtype)).sum(dim=1)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses the experts of each token: [N, num_chosen] int64, and their weights, float32; all in float32.

        Of equal scores that of the lower number is taken.
        """
        config, scoring = self.config, self.config.mixture.scoring
        scores: torch.Tensor = self.router(x.to(torch.float32))
        if scoring is Scoring.SOFTMAX:
            scores = scores.softmax(dim=-1)
        elif scoring is Scoring.SIGMOID:
            scores = sigmoid(scores)
        marks = scores if self.choice_bias is None else scores + self.choice_bias
        if config.num_groups > 1:
            marks = _within_groups(marks, config.num_groups, config.num_chosen_groups)
        chosen = _greatest(marks, config.num_chosen)
        weights = scores.gather(1, chosen)
        if scoring is Scoring.SOFTMAX_OF_CHOSEN:
            weights = weights.softmax(dim=-1)
        if config.is_normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
        return chosen, weights * config.scaling

    def pack(self) -> None:
        """Gives the weights of each expert their fastest layout on a CPU; they cannot be read or set any more."""
        if self.gate_up is not None and self.gate_up.is_cpu and self.by_kernels is None:
            self._each = self._linears()
            for gate_up, down in self._each:
                gate_up.pack()
                down.pack()
            if self._each[0][0].weight is None:
                self.gate_up = self.down = None

    def _linears(self) -> list[tuple[Linear, Linear]]:
        assert self.gate_up is not None, "weights are only given up once they are packed"
        assert self.down is not None, "as the others"

        def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            own = None if bias is None else nn.Parameter(bias, requires_grad=False)
            return Linear(nn.Parameter(weight, requires_grad=False), own)

        no_biases = [None] * self.config.num_experts
        biases = [no_biases if bias is None else list(bias) for bias in (self.gate_up_bias, self.down_bias)]
        rows = zip(self.gate_up, self.down, *biases, strict=True)
        return [(linear(gate_up, first), linear(down, second)) for gate_up, down, first, second in rows]

    def _by_expert(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Runs each expert that a token takes on the rows of its tokens: [N * num_chosen, hidden_size], by token."""
        each, flat = self._each or self._linears(), chosen.flatten()
        output = x.new_empty(len(flat), x.shape[1])
        for expert in sorted(set(flat.tolist())):
            gate_up, down = each[expert]
            places = (flat == expert).nonzero()[:, 0]
            output[places] = down(self._gated(gate_up(x[places // self.config.num_chosen])))
        return output

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * width], which is overwritten, to [rows, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        limit = self.config.limit
        if limit is None:
            return F.silu(gate).mul_(up)
        up = up.clamp_(-limit, limit).add_(1.0)
        return F.silu(gate.clamp_(max=limit).mul_(_STEEPNESS)).div_(_STEEPNESS).mul_(up)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid by way of float64: in float32 a CPU gives a number other bits at the end of a tensor than within it."""
    return x.to(torch.float64).sigmoid().to(x.dtype)


def _greatest(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Columns of the greatest scores of each row, of equal ones the first: [N, size] to [N, number] int64."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :number]


def _within_groups(scores: torch.Tensor, num_groups: int, num_chosen: int) -> torch.Tensor:
    """Leaves minus infinity outside of the groups whose two greatest scores have the greatest sums: [N, experts]."""
    by_group = scores.view(len(scores), num_groups, -1)
    taken = _greatest(by_group.topk(2, dim=-1).values.sum(dim=-1), num_chosen)
    is_out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, taken, value=False)
    return by_group.masked_fill(is_out[..., None], -torch.inf).flatten(1)
