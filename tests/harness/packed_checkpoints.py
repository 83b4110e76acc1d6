"""Makes checkpoints with packed weights of those that have none, number by number as the layouts' formulas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from slipstream.services.models import decoder
from slipstream.services.models.packed_ints import keeps_packed
from tests.harness.checkpoints import write_json, write_weights
from tests.harness.fp8_checkpoints import compressed_tensors

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each place in a word, lowest bits first."""
FP4 = [sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


class Layout(NamedTuple):
    """How a test packs weights."""

    config: dict[str, Any]
    """`quantization_config`."""
    num_bits: int = 4
    group_size: int = 32
    is_symmetric: bool = False
    has_order: bool = False


def gptq(**changes: Any) -> dict[str, Any]:
    """What GPTQModel writes."""
    shared = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    return shared | {"checkpoint_format": "gptq"} | changes


def awq(**changes: Any) -> dict[str, Any]:
    """What AutoAWQ writes."""
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True} | changes


def packed(**changes: Any) -> dict[str, Any]:
    """What llm-compressor writes."""
    weights = {"type": "int", "num_bits": 4, "group_size": 32, "symmetric": True} | changes
    strategy = weights.pop("strategy", "group")
    return compressed_tensors(strategy, **weights) | {"format": "pack-quantized"}


LAYOUTS: dict[str, Layout] = {
    "gptq": Layout(gptq()),
    "gptq-symmetric-16": Layout(gptq(group_size=16, sym=True), group_size=16, is_symmetric=True),
    "gptq-order": Layout(gptq(desc_act=True), has_order=True),
    "gptq-v2-rows": Layout(gptq(checkpoint_format="gptq_v2", group_size=-1), group_size=-1),
    "gptq-v2-format": Layout(gptq(checkpoint_format=None, format="gptq_v2")),
    "gptq-8-bits": Layout(gptq(bits=8), num_bits=8),
    "awq": Layout(awq()),
    "awq-16": Layout(awq(group_size=16), group_size=16),
    "packed": Layout(packed(), is_symmetric=True),
    "packed-zero-points": Layout(packed(symmetric=False)),
    "packed-8-bits": Layout(packed(num_bits=8, symmetric=False), num_bits=8),
    "packed-rows": Layout(packed(strategy="channel", group_size=None), group_size=-1, is_symmetric=True),
    "packed-order": Layout(packed(actorder="group"), is_symmetric=True, has_order=True),
}


def pack(path: Path, name: str, *, is_left: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Packs the projections of a checkpoint, where it is; returns what its weights are now worth, in float32.

    `is_left`: parts of the names of projections that stay plain.
    """
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(4)
    weights = load_file(path / "model.safetensors")
    worth = dict(weights)
    for tensor, weight in list(weights.items()):
        is_projection = tensor.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
        if not is_projection or any(part in tensor for part in is_left):
            continue
        parts, worth[tensor] = _packed(layout, weight, generator)
        del weights[tensor]
        weights |= {tensor.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    write_weights(path, weights)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", config | {"quantization_config": layout.config})
    return worth


def _packed(
    layout: Layout, weight: torch.Tensor, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a weight, by the ends of their names, and the products of numbers and scales."""
    (rows, columns), most = weight.shape, 2**layout.num_bits - 1
    size = columns if layout.group_size == -1 else layout.group_size
    groups = torch.arange(columns) // size
    if layout.has_order:
        groups = groups[torch.randperm(columns, generator=generator)]
    num_groups = columns // size
    scales, zeros = torch.zeros(rows, num_groups), torch.zeros(rows, num_groups, dtype=torch.int64)
    for group in range(num_groups):
        own = weight[:, groups == group]
        least, greatest = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if layout.is_symmetric:
            scales[:, group], zeros[:, group] = own.abs().amax(1) * 2 / most, (most + 1) // 2
        else:
            scales[:, group] = (greatest - least) / most
            zeros[:, group] = (-least / scales[:, group]).round().long().clamp(1, most)
    scales = scales.to(torch.float16)
    spread = scales.float()[:, groups]
    numbers = ((weight / spread).round().long() + zeros[:, groups]).clamp(0, most)
    worth = (numbers - zeros[:, groups]).float() * spread
    return _tensors(layout, numbers, zeros, scales, groups.to(torch.int32)), worth


def _tensors(
    layout: Layout, numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> dict[str, torch.Tensor]:
    bits, method = layout.num_bits, layout.config["quant_method"]
    if method == "awq":
        columns = [8 * (place // 8) + AWQ_ORDER[place % 8] for place in range(len(numbers))]
        named = (words(numbers.T[:, columns], bits), words(zeros.T[:, columns], bits))
        return {"qweight": named[0], "qzeros": named[1], "scales": scales.T}
    if method == "gptq":
        stored = zeros.T - int("gptq_v2" not in layout.config.values())
        made = {"qweight": words(numbers, bits).T, "qzeros": words(stored, bits)}
        return made | {"scales": scales.T, "g_idx": groups}
    made = {"weight_packed": words(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor(numbers.shape)}
    if not layout.is_symmetric:
        made["weight_zero_point"] = words(zeros.T, bits).T
    return made | ({"weight_g_idx": groups} if layout.has_order else {})


def keep_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps packed weights on a CPU, too, where FP8 weights are kept."""
    elsewhere = torch.device("meta")
    monkeypatch.setattr(decoder, "keeps_packed", lambda layout, _, *sizes: keeps_packed(layout, elsewhere, *sizes))


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs each row's numbers into words, lowest bits first: int32."""
    per_word = 32 // bits
    packed_words = torch.zeros(len(numbers), numbers.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        packed_words |= numbers[:, place::per_word] << bits * place
    return (packed_words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def pack_experts(path: Path) -> dict[str, torch.Tensor]:
    """Makes the stacked experts of a checkpoint MXFP4, where it is; returns what its weights are now worth."""
    weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(5)
    worth = dict(weights)
    for name, weight in list(weights.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        number, columns, rows = weight.shape
        halves = torch.randint(0, 16, (number, rows, columns // 32, 32), generator=generator)
        exponents = torch.randint(121, 126, (number, rows, columns // 32), generator=generator)
        values = torch.tensor(FP4)[halves] * 2.0 ** (exponents - 127)[..., None]
        worth[name] = values.flatten(2).transpose(1, 2).contiguous()
        del weights[name]
        weights[f"{name}_blocks"] = (halves[..., ::2] | halves[..., 1::2] << 4).to(torch.uint8)
        weights[f"{name}_scales"] = exponents.to(torch.uint8)
    write_weights(path, weights)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", config | {"quantization_config": {"quant_method": "mxfp4"}})
    return worth
