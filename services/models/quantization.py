"""How a checkpoint holds its layers' weights where they are not plain numbers: `quantization_config`.

FP8 weights stay what they are where kernels can multiply them (`Fp8Weights`), and so do packed ones of 4 and 8 bits on
a GPU (`PackedInts`). Other packed ones become plain numbers when they are loaded (the formulas are in `packed.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from slipstream.services.models.json_files import is_integer

if TYPE_CHECKING:
    from collections.abc import Iterable

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


class Packing(Enum):
    """The layouts of packed weights."""

    GPTQ = auto()
    AWQ = auto()
    """That of its `gemm` kernels."""
    COMPRESSED_TENSORS = auto()
    """Its format `pack-quantized`."""
    MXFP4 = auto()
    """Numbers of four bits, 32 of which share a power of two; only of stacked experts."""


MXFP4_GROUP = 32
"""Columns that share an exponent."""
_WORD_BITS = 32
_WORDS, _BYTES, _LENGTHS, FLOATS = ("I32",), ("U8",), ("I64",), ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """How a checkpoint packs the weights of its layers' projections: integers, scales and zero points by group."""

    packing: Packing
    num_bits: int = 4
    group_size: int | None = None
    """Columns of a row that share a scale; None: all."""
    has_zero_points: bool = True
    zero_offset: int = 0
    """Added to zero points as they are stored."""
    has_order: bool = False
    """A tensor says which group each column belongs to."""
    plain: frozenset[str] = frozenset()
    """Parameters that kernels cannot read packed, as parts of them are plain, or have their columns in other orders."""

    @property
    def is_of_ints(self) -> bool:
        """True if the numbers are integers with scales and zero points."""
        return self.packing is not Packing.MXFP4

    @property
    def name(self) -> str:
        """The end of the name of the tensor with the numbers."""
        return {Packing.COMPRESSED_TENSORS: "weight_packed", Packing.MXFP4: "_blocks"}.get(self.packing, "qweight")

    @property
    def order_name(self) -> str:
        """The end of the name of the tensor with the columns' groups."""
        return "weight_g_idx" if self.packing is Packing.COMPRESSED_TENSORS else "g_idx"

    def num_groups(self, columns: int) -> int:
        """Groups of a row."""
        return 1 if self.group_size is None else columns // self.group_size

    def parts(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Shapes and dtypes of the tensors of a weight, [rows, columns], by the ends of their names."""
        per_word, groups = _WORD_BITS // self.num_bits, self.num_groups(columns)
        order = {self.order_name: ((columns,), _WORDS)} if self.has_order else {}
        match self.packing:
            case Packing.GPTQ:
                numbers, zeros = (columns // per_word, rows), (groups, rows // per_word)
            case Packing.AWQ:
                numbers, zeros = (columns, rows // per_word), (groups, rows // per_word)
            case Packing.COMPRESSED_TENSORS:
                zero = {"weight_zero_point": ((-(-rows // per_word), groups), _WORDS)} if self.has_zero_points else {}
                return {
                    self.name: ((rows, -(-columns // per_word)), _WORDS),
                    "weight_scale": ((rows, groups), FLOATS),
                    "weight_shape": ((2,), _LENGTHS),
                    **zero,
                    **order,
                }
            case Packing.MXFP4:
                groups = columns // MXFP4_GROUP
                return {self.name: ((rows, groups, MXFP4_GROUP // 2), _BYTES), "_scales": ((rows, groups), _BYTES)}
        return {self.name: (numbers, _WORDS), "qzeros": (zeros, _WORDS), "scales": ((groups, rows), FLOATS), **order}


def read_quantization(
    fields: ConfigFields, columns: Iterable[int], rows: Iterable[int]
) -> Fp8Weights | PackedWeights | None:
    """Reads `quantization_config`; None where there is none. `columns`, `rows`: of the layers' weights.

    Raises `CheckpointError` for what is not supported, and for groups that do not divide the columns.
    """
    given = fields.sub("quantization_config")
    if fields.get("quantization_config") is None:
        return None
    if fields.get("compression_config") is not None:
        raise fields.error("compression_config", "none beside quantization_config")
    match given.get("quant_method"):
        case "fp8":
            _check(given, "fmt", "e4m3", None)
            _check(given, "weight_block_size", [BLOCK, BLOCK])
            return Fp8Weights(Scaling.BLOCK, "weight_scale_inv")
        case "gptq":
            _check(given, "bits", 4, 8)
            layout = _layout_field(given, "checkpoint_format")
            _check(given, layout, "gptq", "gptq_v2", None)
            _check(given, "desc_act", True, False)
            return PackedWeights(
                packing=Packing.GPTQ,
                num_bits=given.get("bits"),
                group_size=_group_size(given, given.get("bits"), columns, rows),
                zero_offset=0 if given.get(layout) == "gptq_v2" else 1,
                has_order=True,
            )
        case "awq":
            _check(given, "bits", 4)
            _check(given, _layout_field(given, "version"), "gemm", "GEMM", None)
            _check(given, "zero_point", True)
            return PackedWeights(packing=Packing.AWQ, group_size=_group_size(given, 4, columns, rows))
        case "mxfp4":
            _check(given, "group_size", MXFP4_GROUP, None)
            _group_size(given.with_values({"group_size": MXFP4_GROUP}), 4, columns, ())
            return PackedWeights(packing=Packing.MXFP4, group_size=MXFP4_GROUP)
    _check(given, "quant_method", "compressed-tensors", others="awq, fp8, gptq, mxfp4")
    return _compressed_tensors(given, columns, rows)


def _layout_field(given: ConfigFields, older: str) -> str:
    """The field that names the layout: `format`, but for the older one where it is there, as in transformers."""
    return "format" if given.get(older) is None else older


def _group_size(given: ConfigFields, num_bits: int, columns: Iterable[int], rows: Iterable[int]) -> int | None:
    """Reads how many columns share a scale; groups and words are whole in all weights."""
    size: object = given.get("group_size")
    per_word = _WORD_BITS // num_bits
    if not is_integer(size) or (size != -1 and (size < 1 or size % per_word)):
        raise given.error("group_size", f"-1, or a multiple of {per_word}")
    group_size = None if size == -1 else size
    for width in sorted(columns):
        if width % (group_size or per_word):
            raise given.error("group_size", f"a divisor of {width}, the columns of some weights")
    for height in sorted(rows):
        if height % per_word:
            raise given.error(
                "group_size", f"any, of weights whose rows are multiples of {per_word}: some have {height}"
            )
    return group_size


def _compressed_tensors(given: ConfigFields, columns: Iterable[int], rows: Iterable[int]) -> Fp8Weights | PackedWeights:
    """Reads compressed-tensors' settings: one scheme for all linear layers."""
    _check(given, "format", "float-quantized", "pack-quantized")
    _check(given, "kv_cache_scheme", None, {})
    _check(given.sub("sparsity_config"), "format", None, "dense")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise given.error("config_groups", "one group")
    group = given.sub("config_groups").sub(next(iter(groups)))
    _check(group, "targets", ["Linear"])
    weights = group.sub("weights")
    _check(weights, "dynamic", False, None)
    if given.get("format") == "pack-quantized":
        return _pack_quantized(weights, columns, rows)
    _check(weights, "num_bits", 8)
    _check(weights, "type", "float")
    _check(weights, "symmetric", True)
    _check(weights, "strategy", *(scaling.value for scaling in Scaling))
    scaling = Scaling(weights.get("strategy"))
    if scaling is Scaling.BLOCK:
        _check(weights, "block_structure", [BLOCK, BLOCK])
    return Fp8Weights(scaling, "weight_scale")


def _pack_quantized(weights: ConfigFields, columns: Iterable[int], rows: Iterable[int]) -> PackedWeights:
    _check(weights, "num_bits", 4, 8)
    _check(weights, "type", "int")
    _check(weights, "symmetric", True, False)
    _check(weights, "strategy", "group", "channel")
    _check(weights, "actorder", None, False, "static", "weight", "group")
    has_groups, num_bits = weights.get("strategy") == "group", weights.get("num_bits")
    return PackedWeights(
        packing=Packing.COMPRESSED_TENSORS,
        num_bits=num_bits,
        group_size=_group_size(weights, num_bits, columns, rows) if has_groups else None,
        has_zero_points=not weights.get("symmetric"),
        has_order=has_groups and weights.get("actorder") == "group",
    )


def _check(fields: ConfigFields, name: str, *accepted: Any, others: str = "") -> None:
    """Raises `CheckpointError` if the field has none of these values; `others`: what else could have been there."""
    given = fields.get(name)
    if not any(type(given) is type(value) and given == value for value in accepted):  # no 4.0 for 4, and no 1 for true
        raise fields.error(name, ", ".join([*(str(value) for value in accepted), *([others] if others else [])]))
