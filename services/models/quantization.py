"""How a checkpoint holds its layers' weights where they are not plain numbers: `quantization_config`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slipstream.services.models.json_files import ConfigFields

BLOCK = 128
"""Rows and columns of a weight that share a scale, where scales are by block."""


class Scaling(Enum):
    """The numbers of a weight that share a scale, named as in compressed-tensors."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    """A row, which makes one output."""
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """How a checkpoint scales the weights of its layers' projections."""

    scaling: Scaling
    scale_name: str
    """A weight `NAME.weight` has the scales `NAME.{scale_name}`."""

    @classmethod
    def from_fields(cls, fields: ConfigFields) -> Fp8Weights | None:
        """Reads `quantization_config`; None where there is none. Raises `CheckpointError` for one that is not FP8."""
        if fields.get("quantization_config") is None:
            return None
        given = fields.sub("quantization_config")
        if given.get("quant_method") == "fp8":
            _check(given, "fmt", "e4m3", None)
            _check(given, "weight_block_size", [BLOCK, BLOCK])
            return cls(Scaling.BLOCK, "weight_scale_inv")
        _check(given, "quant_method", "compressed-tensors", others="fp8, of FP8 weights")
        return cls(_scaling(given), "weight_scale")

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the scales of a weight, [rows, columns], in the checkpoint."""
        match self.scaling:
            case Scaling.TENSOR:
                return (1,)
            case Scaling.CHANNEL:
                return (rows, 1)
            case Scaling.BLOCK:
                return (-(-rows // BLOCK), -(-columns // BLOCK))

    def by_row(self, scales: torch.Tensor, rows: int) -> torch.Tensor:
        """Repeats a checkpoint's scales for each of `rows` rows: [rows, blocks of columns] float32."""
        repeats = {Scaling.TENSOR: rows, Scaling.CHANNEL: 1, Scaling.BLOCK: BLOCK}[self.scaling]
        by_block = scales.float().reshape(self.shape(rows, BLOCK)[0], -1)
        return by_block.repeat_interleave(repeats, 0)[:rows]


def _scaling(given: ConfigFields) -> Scaling:
    """Reads compressed-tensors' settings: one scheme for all linear layers."""
    _check(given, "format", "float-quantized")
    _check(given, "kv_cache_scheme", None, {})
    _check(given.sub("sparsity_config"), "format", None, "dense")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise given.error("config_groups", "one group")
    group = given.sub("config_groups").sub(next(iter(groups)))
    _check(group, "targets", ["Linear"])
    weights = group.sub("weights")
    _check(weights, "num_bits", 8)
    _check(weights, "type", "float")
    _check(weights, "symmetric", True)
    _check(weights, "dynamic", False, None)
    _check(weights, "strategy", *(scaling.value for scaling in Scaling))
    scaling = Scaling(weights.get("strategy"))
    if scaling is Scaling.BLOCK:
        _check(weights, "block_structure", [BLOCK, BLOCK])
    return scaling


def _check(fields: ConfigFields, name: str, *accepted: Any, others: str = "") -> None:
    """Raises `CheckpointError` if the field has none of these values; `others`: what else could have been there."""
    if fields.get(name) not in accepted:
        raise fields.error(name, ", ".join([*(str(value) for value in accepted), *([others] if others else [])]))
