"""Tensor parallelism: the part of a model that one rank of several has (Shoeybi et al., "Megatron-LM", 2019).

Of the projections that read the hidden state a rank has some rows: those of its heads, and of its part of the MLP or
of each expert. Of those that write it, it has the columns that read these, so that all ranks' outputs add up; a bias
is added by rank 0. Key heads that are fewer than ranks lie on several of them. The vocabulary is split in equal parts
with padding at the end; norms, routers and what is as small are on all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import ConfigError
from slipstream.services.models.families import HeadNorms
from slipstream.services.models.quantization import BLOCK, Packing, Scaling

if TYPE_CHECKING:
    from slipstream.services.models.config import ModelConfig, Rank
    from slipstream.services.models.slots import Slot, Slots

SIZE = "tensor_parallel_size"
_ENDS = ("weight", "bias", "scales")


class _Segment(NamedTuple):
    """Rows of a parameter that are split by themselves, as those of the keys."""

    num_rows: int
    begin: int
    end: int
    """The rank has `[begin, end)` of `num_rows`."""


def sharded(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The model as one rank computes it. Raises ConfigError where it cannot be split into so many parts."""
    count = rank.size
    if count == 1:
        return config
    if config.packed is not None and config.packed.packing is Packing.MXFP4:
        raise ConfigError(SIZE, count, "1 with weights in MXFP4")
    experts = config.experts
    divided = {"num_attention_heads": config.num_heads}
    if experts is None or not all(experts.layers):
        divided["intermediate_size"] = config.intermediate_size
    if experts is not None:
        divided |= {experts.mixture.width: experts.width, "the shared expert's width": experts.shared_width}
        experts = replace(experts, width=experts.width // count, shared_width=experts.shared_width // count)
    for name, size in divided.items():
        if size % count:
            raise ConfigError(SIZE, count, f"a divisor of {name} = {size}")
    if config.num_kv_heads % count and count % config.num_kv_heads:
        raise ConfigError(SIZE, count, f"a divisor or a multiple of num_key_value_heads = {config.num_kv_heads}")
    return replace(
        config,
        rank=rank,
        num_heads=config.num_heads // count,
        num_kv_heads=max(1, config.num_kv_heads // count),
        intermediate_size=config.intermediate_size // count,
        experts=experts,
    )


def sharded_slots(slots: Slots, config: ModelConfig, rank: Rank) -> Slots:
    """The places of a checkpoint's tensors in a rank's model, and the part of each that it reads.

    `config`: of the whole model, as `slots` are.
    """
    if rank.size == 1:
        return slots
    own = _Parts(config, rank)
    return {name: own.of(slot) for name, slot in slots.items()}


class _Parts:
    """A rank's part of each tensor."""

    def __init__(self, config: ModelConfig, rank: Rank) -> None:
        self._config, self._rank, self._own = config, rank, sharded(config, rank)
        first_key = rank.number * config.num_kv_heads // rank.size * config.head_dim
        self._queries = self._equal(config.q_size)
        self._keys = _Segment(config.kv_size, first_key, first_key + self._own.kv_size)

    def of(self, slot: Slot) -> Slot:
        """The tensor's place in this rank's parameter."""
        *path, name = slot.parameter.split(".")
        is_bias = name == "bias" or name.endswith("_bias")
        what = path[-1] if name in _ENDS else name.removesuffix("_bias")
        match what:
            case "embedding" | "head":
                begin = self._rank.number * self._own.vocab_rows
                end = min(begin + self._own.vocab_rows, slot.shape[0])
                return replace(slot, rows=((begin, end),) if begin < end else ())
            case "qkv":
                return self._of_rows(slot, (self._queries, self._keys, self._keys))
            case "gate_up":
                part = self._equal(self._width(slot))
                return (
                    replace(slot, rows=((part.begin, part.end),))
                    if slot.is_stacked
                    else self._of_rows(slot, (part, part))
                )
            case "output" | "down" if is_bias:
                return slot if self._rank.number == 0 else replace(slot, rows=())
            case "output" | "down":
                part = self._equal(self._config.q_size if what == "output" else self._width(slot))
                return replace(slot, columns=self._columns(slot, part))
            case "sinks":
                return self._of_rows(slot, (self._equal(self._config.num_heads),))
            case "query_norm" | "key_norm" if self._config.head_norms is HeadNorms.ALL:
                return self._of_rows(slot, (self._queries if what == "query_norm" else self._keys,))
        return slot

    def _equal(self, size: int) -> _Segment:
        part = size // self._rank.size
        return _Segment(size, self._rank.number * part, (self._rank.number + 1) * part)

    def _width(self, slot: Slot) -> int:
        """The width of the MLP, or of the experts, that a tensor belongs to."""
        experts = self._config.experts_of(int(slot.parameter.split(".")[1]))
        if experts is None:
            return self._config.intermediate_size
        return experts.width if ".experts." in slot.parameter else experts.shared_width

    def _of_rows(self, slot: Slot, segments: tuple[_Segment, ...]) -> Slot:
        """`segments`: of the whole parameter, of which the tensor has some."""
        are_scales = slot.parameter.endswith("scales")
        whole, own = (self._config.rows_per_scale, self._own.rows_per_scale) if are_scales else (1, 1)
        begin = slot.start * whole
        end, at, start = begin + (slot.num_rows or slot.shape[0]), 0, 0
        rows: list[tuple[int, int]] = []
        for segment in segments:
            if at < begin:
                start += segment.end - segment.begin
            elif at < end:
                rows.append((at - begin + segment.begin, at - begin + segment.end))
            at += segment.num_rows
        return replace(slot, start=start // own, rows=tuple(rows))

    def _columns(self, slot: Slot, part: _Segment) -> tuple[int, int] | None:
        if slot.fp8 is None or not slot.num_rows:
            return part.begin, part.end
        # Scales have a column for each block, or one for all.
        return (part.begin // BLOCK, part.end // BLOCK) if slot.fp8.scaling is Scaling.BLOCK else None
