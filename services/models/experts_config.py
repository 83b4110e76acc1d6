"""The experts of a model's layers, as read from `config.json`: how many there are, and how a token takes some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.services.models.json_files import is_integer

if TYPE_CHECKING:
    from slipstream.services.models.families import Mixture
    from slipstream.services.models.json_files import ConfigFields

_MAX_EXPERTS = 2**12
_MAX_WIDTH = 2**20
_MAX_SHARED = 64
"""Shared experts, which are one."""
_SAVED_NUMBER = "num_local_experts"
"""The field that transformers 5 writes in place of that of some families."""
_DENSE_LAYERS, _FIRST_LAYERS, _EVERY = "mlp_only_layers", "first_k_dense_replace", "decoder_sparse_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The shape of the experts, the same in all layers that have them."""

    mixture: Mixture
    num_experts: int
    num_chosen: int
    """Experts that a token takes."""
    width: int
    """Intermediate size of each."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; else its MLP is dense."""
    is_normalised: bool
    """The weights of a token's experts are divided by their sum."""
    scaling: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Groups that a token takes experts of: those whose two greatest scores have the greatest sums."""
    shared_width: int = 0
    """Intermediate size of the shared expert; 0: there is none."""
    limit: float | None = None
    """The bound of gates and ups."""

    @classmethod
    def from_fields(
        cls, given: ConfigFields, defaults: dict[str, Any], mixture: Mixture, *, num_layers: int
    ) -> ExpertsConfig:
        """Reads `config.json`. Raises `CheckpointError` for numbers that do not fit each other."""
        fields = given.over(defaults)
        number = mixture.num_experts
        if _SAVED_NUMBER in given.names and number not in given.names:
            number = _SAVED_NUMBER
        num_experts = fields.count(number, high=_MAX_EXPERTS)
        width = fields.count(mixture.width, high=_MAX_WIDTH)
        num_groups = num_chosen_groups = 1
        if mixture.has_groups:
            num_groups = fields.count("n_group", high=num_experts)
            if num_experts % num_groups or (num_groups > 1 and num_experts == num_groups):
                raise fields.error("n_group", f"a divisor of {number} = {num_experts}, with 2 in each group")
            num_chosen_groups = fields.count("topk_group", high=num_groups)
        most = num_experts // num_groups * num_chosen_groups
        return cls(
            mixture=mixture,
            num_experts=num_experts,
            num_chosen=fields.count("num_experts_per_tok", high=most),
            width=width,
            layers=_layers(fields, num_layers),
            is_normalised=fields.flag(mixture.normalises),
            scaling=fields.factor("routed_scaling_factor") if mixture.has_groups else 1.0,
            num_groups=num_groups,
            num_chosen_groups=num_chosen_groups,
            shared_width=_shared_width(fields, mixture, width),
            limit=None if mixture.limit is None else fields.factor(mixture.limit),
        )

    @property
    def numbers_per_token(self) -> int:
        """Numbers that a token's experts make on the way, without inputs and outputs."""
        return 3 * (self.num_chosen * self.width + self.shared_width)


def _shared_width(fields: ConfigFields, mixture: Mixture, width: int) -> int:
    if mixture.shared is None:
        return 0
    if mixture.shared_width is not None:
        return fields.count(mixture.shared_width, high=_MAX_WIDTH)
    return width * fields.count(mixture.shared_count, high=_MAX_SHARED)


def _layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    first, dense = fields.get(_FIRST_LAYERS) or 0, fields.get(_DENSE_LAYERS) or []
    if not is_integer(first) or not 0 <= first <= num_layers:
        raise fields.error(_FIRST_LAYERS, f"an integer from 0 to num_hidden_layers = {num_layers}")
    if not isinstance(dense, list) or not all(is_integer(layer) and 0 <= layer < num_layers for layer in dense):
        raise fields.error(_DENSE_LAYERS, f"a list of layers below num_hidden_layers = {num_layers}")
    every = fields.count(_EVERY, 1, high=num_layers)
    return tuple(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
