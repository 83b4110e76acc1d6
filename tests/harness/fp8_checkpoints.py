"""Makes checkpoints with FP8 weights of those that have none, in the layouts that are published."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.harness.checkpoints import write_json, write_weights

BLOCK = 128
WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "symmetric": True,
    "type": "float",
}


def compressed_tensors(strategy: str, **changes: Any) -> dict[str, Any]:
    """What llm-compressor writes."""
    weights = WEIGHTS | {"strategy": strategy} | ({"block_structure": [BLOCK, BLOCK]} if strategy == "block" else {})
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights | changes}
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


FP8_LAYOUTS: dict[str, dict[str, Any]] = {
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "channel": compressed_tensors("channel"),
    "tensor": compressed_tensors("tensor"),
    "block": compressed_tensors("block"),
}
"""`quantization_config` by a layout's name."""


def quantise(path: Path, layout: str) -> dict[str, torch.Tensor]:
    """Makes the projections of a checkpoint FP8, where it is; returns what its weights are now worth, in float32."""
    weights = load_file(path / "model.safetensors")
    worth, scale_name = dict(weights), "weight_scale_inv" if layout == "fp8" else "weight_scale"
    for name, weight in list(weights.items()):
        if name.endswith("_proj.weight"):
            weights[name], scales, worth[name] = _quantised(weight, layout)
            weights[f"{name.removesuffix('weight')}{scale_name}"] = scales
            if layout == "tensor":
                weights[name.replace(".weight", ".input_scale")] = torch.ones(1)
    write_weights(path, weights)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", config | {"quantization_config": FP8_LAYOUTS[layout]})
    return worth


def _quantised(weight: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers, their scales as a checkpoint has them, and the products of both."""
    rows, columns = weight.shape
    height, width = {"channel": (1, columns), "tensor": (rows, columns)}.get(layout, (BLOCK, BLOCK))
    shape = math.ceil(rows / height), math.ceil(columns / width)
    padded = weight.new_zeros(shape[0] * height, shape[1] * width)
    padded[:rows, :columns] = weight
    scales = padded.view(shape[0], height, shape[1], width).abs().amax((1, 3)) / 448
    if layout != "channel":
        scales = scales.to(torch.bfloat16).to(torch.float32)
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    kept = scales if layout == "channel" else scales.to(torch.bfloat16)
    return numbers, kept.view(()) if layout == "tensor" else kept, numbers.to(torch.float32) * spread
