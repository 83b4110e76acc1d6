"""Checkpoints with FP8 weights: their numbers and scales, and one clear line for each that is not supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.common.errors import CheckpointError
from slipstream.services.models.checkpoint import LoadFormat, load_decoder
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.linear import FP8, Linear, dequantised, keeps_fp8
from tests.harness.checkpoints import LLAMA, refusal, write_checkpoint, write_json, write_weights
from tests.harness.fp8_checkpoints import FP8_LAYOUTS, compressed_tensors, quantise
from tests.harness.paged_model import CPU, PagedModel, random_tokens
from tests.harness.transformers_checkpoints import write_by_transformers

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "head_dim": 48,
    "intermediate_size": 320,
    "attention_bias": True,
}
"""Blocks that are not whole, and rows of keys that begin within one."""
Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(params=FP8_LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_cpu_computes_with_the_numbers_times_scales(tmp_path: Path, layout: str, family: str) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 320} if family == "phi3" else SIZES
    plain, quantised = (write_checkpoint(tmp_path / name, family=family, **sizes) for name in ("plain", "quantised"))
    write_weights(plain, quantise(quantised, layout))
    prompt = [(0, random_tokens(12, seed=1))]
    expected, model = PagedModel(plain), PagedModel(quantised)
    assert torch.equal(model.run(model.batch(prompt)), expected.run(expected.batch(prompt)))


def test_experts_become_plain(tmp_path: Path, layout: str) -> None:
    plain, quantised = (
        write_by_transformers(tmp_path / name, "qwen2-moe", has_tokenizer=False) for name in ("plain", "quantised")
    )
    write_weights(plain, quantise(quantised, layout))
    prompt = [(0, random_tokens(12, seed=1))]
    expected, model = PagedModel(plain), PagedModel(quantised)
    assert torch.equal(model.run(model.batch(prompt)), expected.run(expected.batch(prompt)))
    halves = dict(load_decoder(quantised, device=CPU, dtype=torch.bfloat16).named_parameters())
    others = dict(load_decoder(plain, device=CPU, dtype=torch.bfloat16).named_parameters())
    names = [name for name in others if ".experts." in name]
    assert len(names) == 3 * 2, "two of each layer that has experts"
    assert all(torch.equal(halves[name], others[name]) for name in names)


def test_in_bfloat16_the_weights_stay_fp8(tmp_path: Path, layout: str) -> None:
    path = write_checkpoint(tmp_path / "it", **SIZES)
    worth = quantise(path, layout)
    decoder = load_decoder(path, device=CPU, dtype=torch.bfloat16)
    numbers = load_file(path / "model.safetensors")
    layer = decoder.layers[1]
    for linear, names in ((layer.qkv, ("q_proj", "k_proj", "v_proj")), (layer.down, ("down_proj",))):
        block = "mlp" if names == ("down_proj",) else "self_attn"
        assert isinstance(linear, Linear)
        assert linear.weight is not None
        assert linear.scales is not None
        full = [f"model.layers.1.{block}.{name}.weight" for name in names]
        assert torch.equal(
            linear.weight.view(torch.uint8), torch.cat([numbers[name].view(torch.uint8) for name in full])
        )
        assert torch.equal(dequantised(linear.weight, linear.scales), torch.cat([worth[name] for name in full]))
        x = torch.randn(3, linear.weight.shape[1], generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        bias = 0 if linear.bias is None else linear.bias.to(torch.float32)
        by_hand = x.to(torch.float32) @ torch.cat([worth[name] for name in full]).T + bias
        torch.testing.assert_close(linear(x).to(torch.float32), by_hand, atol=0.05, rtol=0.02)
    assert decoder.head.weight is not None
    assert decoder.head.weight.dtype == decoder.embedding.dtype == torch.bfloat16


def test_memory_is_that_of_fp8_weights(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA | SIZES | {"quantization_config": FP8_LAYOUTS["fp8"]})
    config = ModelConfig.from_directory(tmp_path)

    def num_bytes(dtype: torch.dtype) -> int:
        decoder = Decoder(config, device=torch.device("meta"), dtype=dtype)
        return sum(parameter.nbytes for layer in decoder.layers for parameter in layer.parameters())

    assert 0.25 < num_bytes(torch.bfloat16) / num_bytes(torch.float32) < 0.28


def test_kernels_take_whole_blocks_alone(tmp_path: Path) -> None:
    whole = SIZES | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}
    for sizes, has_whole_blocks in ((SIZES, False), (whole, True)):
        path = tmp_path / str(has_whole_blocks)
        path.mkdir()
        write_json(path / "config.json", LLAMA | sizes | {"quantization_config": FP8_LAYOUTS["channel"]})
        assert ModelConfig.from_directory(path).has_whole_blocks is has_whole_blocks
    assert not keeps_fp8(torch.device("cuda"), torch.bfloat16, has_whole_blocks=False)


def test_random_weights_of_config_json_alone(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA | SIZES | {"quantization_config": FP8_LAYOUTS["fp8"]})
    decoder = load_decoder(tmp_path, device=CPU, dtype=torch.bfloat16, load_format=LoadFormat.DUMMY)
    weight = decoder.layers[0].down.weight
    assert isinstance(weight, torch.Tensor)
    assert weight.dtype == FP8
    assert 0.9 < weight.to(torch.float32).std().item() * SIZES["intermediate_size"] ** 0.5 < 1.1
    model = PagedModel(decoder)
    logits = model.run(model.batch([(0, list(range(3, 23)))]))
    assert 0.3 < logits.std().item() < 3


GROUP = "config_groups.group_0."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"quant_method": "aqlm", "bits": 4},
            "quant_method: got 'aqlm', supported: compressed-tensors, awq, fp8, gptq, mxfp4",
        ),
        ({}, "quant_method: got None, supported: compressed-tensors, awq, fp8, gptq, mxfp4"),
        (FP8_LAYOUTS["fp8"] | {"fmt": "e5m2"}, "fmt: got 'e5m2', supported: e4m3, None"),
        (
            FP8_LAYOUTS["fp8"] | {"weight_block_size": [64, 128]},
            "weight_block_size: got [64, 128], supported: [128, 128]",
        ),
        ({"quant_method": "fp8"}, "weight_block_size: got None, supported: [128, 128]"),
        (
            FP8_LAYOUTS["tensor"] | {"format": "int-quantized"},
            "format: got 'int-quantized', supported: float-quantized, pack-quantized",
        ),
        (
            FP8_LAYOUTS["tensor"] | {"kv_cache_scheme": {"num_bits": 8}},
            "kv_cache_scheme: got {'num_bits': 8}, supported: None, {}",
        ),
        (
            FP8_LAYOUTS["tensor"] | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format: got 'sparse-24-bitmask', supported: None, dense",
        ),
        (FP8_LAYOUTS["tensor"] | {"config_groups": {}}, "config_groups: got {}, supported: one group"),
        (compressed_tensors("tensor", num_bits=4), f"{GROUP}weights.num_bits: got 4, supported: 8"),
        (compressed_tensors("tensor", type="int"), f"{GROUP}weights.type: got 'int', supported: float"),
        (compressed_tensors("tensor", symmetric=False), f"{GROUP}weights.symmetric: got False, supported: True"),
        (
            compressed_tensors("group"),
            f"{GROUP}weights.strategy: got 'group', supported: tensor, channel, block",
        ),
        (
            compressed_tensors("block", block_structure=[64, 64]),
            f"{GROUP}weights.block_structure: got [64, 64], supported: [128, 128]",
        ),
    ],
)
def test_settings_that_are_not_supported(tmp_path: Path, given: dict[str, Any], expected: str) -> None:
    write_json(tmp_path / "config.json", LLAMA | {"quantization_config": given})
    assert refusal(tmp_path) == f"config.json: quantization_config.{expected}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_head_is_rotated(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    """The rows of queries and keys change their order, so weights become plain where they are loaded."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "partial_rotary_factor": 0.75, "head_dim": 24}
    plain, quantised = (write_checkpoint(tmp_path / name, family="phi3", **sizes) for name in ("plain", "quantised"))
    write_weights(plain, quantise(quantised, layout))
    expected, found = (load_decoder(path, device=CPU, dtype=dtype) for path in (plain, quantised))
    prompt = [(0, random_tokens(12, seed=1))]
    models = [PagedModel(decoder) for decoder in (expected, found)]
    assert torch.equal(*(model.run(model.batch(prompt)) for model in models))


class TestTensors:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = write_checkpoint(tmp_path / "it", has_tokenizer=False, **SIZES)
        quantise(path, "fp8")
        return path

    def change(self, path: Path, **changes: torch.Tensor) -> None:
        weights = load_file(path / "model.safetensors")
        weights |= {f"{Q_PROJ}.{name}": value for name, value in changes.items()}
        write_weights(path, weights)

    def test_scales_are_missing(self, path: Path) -> None:
        weights = load_file(path / "model.safetensors")
        del weights[f"{Q_PROJ}.weight_scale_inv"]
        write_weights(path, weights)
        assert refusal(path) == f"missing tensors: {Q_PROJ}.weight_scale_inv; config.json asks for them"

    def test_a_weight_is_not_quantised(self, path: Path) -> None:
        self.change(path, weight=torch.zeros(192, 192))
        assert refusal(path) == (
            f"model.safetensors: tensor {Q_PROJ}.weight: got dtype F32, supported: F8_E4M3 "
            "(quantization_config of config.json)"
        )

    def test_scales_have_another_shape(self, path: Path) -> None:
        self.change(path, weight_scale_inv=torch.ones(2, 3))
        assert refusal(path) == (
            f"model.safetensors: tensor {Q_PROJ}.weight_scale_inv: got shape [2, 3], config.json asks for [2, 2]"
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("name", "bad"), [("weight", torch.nan), ("weight_scale_inv", torch.nan), ("weight_scale_inv", 1e37)]
    )
    def test_values_that_are_not_finite(self, path: Path, name: str, bad: float, dtype: torch.dtype) -> None:
        value = load_file(path / "model.safetensors")[f"{Q_PROJ}.{name}"].to(torch.float32)
        value[1, 1] = bad
        self.change(path, **{name: value.to(FP8) if name == "weight" else value})
        expected = "values from nan to nan" if name == "weight" else "scales that are NaN or infinite"
        with pytest.raises(CheckpointError, match=rf"tensor {Q_PROJ}\.{name}: got {expected}"):
            load_decoder(path, device=CPU, dtype=dtype)
