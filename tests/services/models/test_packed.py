"""Packed weights: each is what its formula says, rounded once; and one clear line for what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.benchmarks.models import SHAPES
from slipstream.common.errors import CheckpointError
from slipstream.services.models.checkpoint import load_decoder
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.head_config import MtpConfig
from slipstream.services.models.packed import Quantised
from slipstream.services.models.packed_ints import PackedInts
from slipstream.services.models.quantization import PackedWeights, Packing
from tests.harness.checkpoints import LLAMA, refusal, write_checkpoint, write_json, write_weights
from tests.harness.packed_checkpoints import LAYOUTS, awq, gptq, pack, pack_experts, packed
from tests.harness.paged_model import CPU, PagedModel, random_tokens
from tests.harness.transformers_checkpoints import write_by_transformers

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "attention_bias": True}
Q_PROJ = "model.layers.1.self_attn.q_proj"
GB = 10**9
PROMPT = [(0, random_tokens(12, seed=1))]


def logits_of(path: Path) -> torch.Tensor:
    model = PagedModel(path)
    return model.run(model.batch(PROMPT))


def assert_worth(path: Path, worth: dict[str, torch.Tensor]) -> None:
    """Compares logits to those of a plain checkpoint with these weights, which is written beside it."""
    plain = path.with_name("plain")
    plain.mkdir()
    config = (path / "config.json").read_text(encoding="utf-8")
    (plain / "config.json").write_text(config.replace("quantization_config", "nothing"), encoding="utf-8")
    write_weights(plain, worth)
    assert torch.equal(logits_of(path), logits_of(plain))
    halves, expected = (
        dict(load_decoder(it, device=CPU, dtype=torch.bfloat16).named_parameters()) for it in (path, plain)
    )
    assert all(torch.equal(parameter, expected[name]) for name, parameter in halves.items()), "rounded once"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_is_what_its_formula_says(tmp_path: Path, layout: str) -> None:
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False, **SIZES)
    assert_worth(path, pack(path, layout))


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3-moe", "gptq-order"), ("mixtral", "awq-16"), ("glm4-moe", "packed-8-bits")]
)
def test_experts_are_packed_and_routers_are_not(tmp_path: Path, family: str, layout: str) -> None:
    sizes = {"intermediate_size": 96} | ({} if family == "mixtral" else {"moe_intermediate_size": 32})
    path = write_by_transformers(tmp_path / "it", family, has_tokenizer=False, head_dim=32, **sizes)
    assert_worth(path, pack(path, layout))


def test_some_projections_are_plain(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False, **SIZES)
    assert_worth(path, pack(path, "awq", is_left=("layers.0.", "k_proj")))


def test_empty_biases_of_gptq(tmp_path: Path) -> None:
    """Older checkpoints have one for every projection."""
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False, **SIZES | {"attention_bias": False})
    worth = pack(path, "gptq")
    weights = load_file(path / "model.safetensors")
    write_weights(path, weights | {f"{Q_PROJ}.bias": torch.zeros(128)})
    assert_worth(path, worth)
    write_weights(path, weights | {f"{Q_PROJ}.bias": torch.ones(128)})
    message = "got numbers, supported: zeros, as by config.json there is no such bias"
    assert refusal(path) == f"model.safetensors: tensor {Q_PROJ}.bias: {message}"


def test_mxfp4_experts(tmp_path: Path) -> None:
    path = write_by_transformers(tmp_path / "it", "gpt-oss", has_tokenizer=False)
    assert_worth(path, pack_experts(path))


def config_with(quantization: object, **changes: Any) -> dict[str, Any]:
    return LLAMA | SIZES | {"quantization_config": quantization} | changes


GROUP = "config_groups.group_0.weights."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (gptq(bits=3), "bits: got 3, supported: 4, 8"),
        (gptq(bits=4.0), "bits: got 4.0, supported: 4, 8"),
        (gptq(checkpoint_format=None, format="marlin"), "format: got 'marlin', supported: gptq, gptq_v2, None"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format: got 'marlin', supported: gptq, gptq_v2, None"),
        (gptq(desc_act=None), "desc_act: got None, supported: True, False"),
        (gptq(group_size=0), "group_size: got 0, supported: -1, or a multiple of 8"),
        (gptq(group_size="32"), "group_size: got '32', supported: -1, or a multiple of 8"),
        (gptq(group_size=128), "group_size: got 128, supported: a divisor of 64, the columns of some weights"),
        (awq(bits=8), "bits: got 8, supported: 4"),
        (awq(version="gemv"), "version: got 'gemv', supported: gemm, GEMM, None"),
        (awq(zero_point=False), "zero_point: got False, supported: True"),
        (awq(group_size=64), "group_size: got 64, supported: a divisor of 96, the columns of some weights"),
        (packed(num_bits=2), f"{GROUP}num_bits: got 2, supported: 4, 8"),
        (packed(type="float"), f"{GROUP}type: got 'float', supported: int"),
        (packed(strategy="tensor"), f"{GROUP}strategy: got 'tensor', supported: group, channel"),
        (packed(group_size=48), f"{GROUP}group_size: got 48, supported: a divisor of 64, the columns of some weights"),
        ({"quant_method": "mxfp4"}, "quant_method: got 'mxfp4', supported: mxfp4 of stacked experts only"),
        ({"quant_method": "bitsandbytes"}, "quant_method: got 'bitsandbytes', supported: compressed-tensors, awq, fp8"),
    ],
)
def test_settings_that_are_not_supported(tmp_path: Path, given: dict[str, Any], expected: str) -> None:
    write_json(tmp_path / "config.json", config_with(given))
    assert refusal(tmp_path).startswith(f"config.json: quantization_config.{expected}")


def test_sizes_that_are_no_whole_groups(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_with(gptq(group_size=8), num_key_value_heads=1, head_dim=20))
    message = refusal(tmp_path)
    assert message.endswith("group_size: got 8, supported: any, of weights whose rows are multiples of 8: some have 20")


def test_two_quantisations_at_once(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False, **SIZES)
    write_json(path / "config.json", config_with(awq(), compression_config=packed()))
    assert refusal(path).endswith("supported: none beside quantization_config")
    pack(path, "awq")
    weights = load_file(path / "model.safetensors")
    write_json(path / "config.json", config_with(awq()))
    write_weights(path, weights | {f"{Q_PROJ}.weight": torch.zeros(128, 64)})
    plain = "got dtype I32, supported: F32, F16, BF16 (no quantised weights)"
    assert refusal(path) == f"model.safetensors: tensor {Q_PROJ}.qweight: {plain}"
    write_weights(path, weights | {f"{Q_PROJ}.weight_scale_inv": torch.ones(1, 1)})
    assert refusal(path).startswith(f"unknown tensors: {Q_PROJ}.weight_scale_inv; ")


def test_modules_for_several_tokens_are_plain(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_with(awq(), num_nextn_predict_layers=1))
    with pytest.raises(CheckpointError, match=r"quantization_config: got .*, supported: none, with multi-token"):
        MtpConfig.from_directory(tmp_path)


class TestTensors:
    """Names, shapes and dtypes are compared before anything takes memory."""

    def changed(self, path: Path, layout: str, **changes: torch.Tensor | None) -> str:
        """Packs a checkpoint, changes tensors of one projection, and returns how it is refused."""
        write_checkpoint(path, has_tokenizer=False, **SIZES)
        pack(path, layout)
        weights = load_file(path / "model.safetensors")
        for name, value in changes.items():
            if value is None:
                del weights[f"{Q_PROJ}.{name}"]
            else:
                weights[f"{Q_PROJ}.{name}"] = value
        write_weights(path, weights)
        return refusal(path)

    @pytest.mark.parametrize(
        ("layout", "name", "value", "expected"),
        [
            ("gptq", "scales", None, "missing tensors: {}; config.json asks for them"),
            ("gptq", "qweight", None, "missing tensors: {}; config.json asks for them"),
            ("gptq", "qweight", torch.zeros(8, 128), "{}: got dtype F32, supported: I32 (quantization_config"),
            (
                "awq",
                "qzeros",
                torch.zeros(3, 16, dtype=torch.int32),
                "{}: got shape [3, 16], config.json asks for [2, 16]",
            ),
            ("packed", "weight_shape", torch.zeros(2), "{}: got dtype F32, supported: I64 (quantization_config"),
        ],
    )
    def test_do_not_fit(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        layout: str,
        name: str,
        value: torch.Tensor | None,
        expected: str,
    ) -> None:
        monkeypatch.setattr(Decoder, "__init__", lambda *_, **__: pytest.fail("a decoder is made"))
        assert expected.format(f"{Q_PROJ}.{name}") in self.changed(tmp_path / "it", layout, **{name: value})

    @pytest.mark.parametrize(
        ("layout", "name", "value", "expected"),
        [
            ("gptq", "scales", torch.full((2, 128), torch.nan), "got scales that are NaN or infinite"),
            ("awq", "scales", torch.full((2, 128), torch.inf), "got scales that are NaN or infinite"),
            ("packed", "weight_scale", torch.full((128, 2), torch.nan), "got scales that are NaN or infinite"),
            (
                "gptq",
                "qzeros",
                torch.full((2, 16), -1, dtype=torch.int32),
                "got zero points of 16, supported: at most 15",
            ),
            ("gptq", "g_idx", torch.full((64,), 2, dtype=torch.int32), "got groups 2 to 2, supported: 0 to 1"),
            ("packed-order", "weight_g_idx", torch.full((64,), -1, dtype=torch.int32), "got groups -1 to -1"),
            ("packed", "weight_shape", torch.tensor([64, 64]), "got [64, 64], supported: [128, 64]"),
            ("packed", "weight_shape", torch.tensor([128, 1]), "got [128, 1], supported: [128, 64]"),
            ("packed", "weight_shape", torch.tensor([128, 56]), "got [128, 56], supported: [128, 64]"),
        ],
    )
    def test_hold_what_cannot_be(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        layout: str,
        name: str,
        value: torch.Tensor,
        expected: str,
    ) -> None:
        monkeypatch.setattr(Decoder, "__init__", lambda *_, **__: pytest.fail("a decoder is made"))
        message = self.changed(tmp_path / "it", layout, **{name: value})
        assert message.startswith(f"model.safetensors: tensor {Q_PROJ}.{name}: {expected}")

    def test_scale_of_mxfp4_that_is_no_number(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_by_transformers(tmp_path / "it", "gpt-oss", has_tokenizer=False)
        pack_experts(path)
        weights = load_file(path / "model.safetensors")
        name = "model.layers.2.mlp.experts.down_proj"
        weights[f"{name}_scales"][1, 2, 0] = 255
        write_weights(path, weights)
        monkeypatch.setattr(Decoder, "__init__", lambda *_, **__: pytest.fail("a decoder is made"))
        assert f"tensor {name}_scales: got scales of NaN, supported: exponents up to 254" in refusal(path)


def test_scales_that_float16_would_round_are_float32() -> None:
    layout = PackedWeights(packing=Packing.GPTQ, group_size=128)
    ints = PackedInts(layout, 128, 256, device=CPU, dtype=torch.bfloat16)
    numbers = torch.zeros(128, 256, dtype=torch.int64)
    zeros, groups = torch.zeros(128, 2, dtype=torch.int64), torch.arange(256) // 128
    ints.fill(0, Quantised(numbers, zeros, torch.full((128, 2), 1e-9), groups))
    assert ints.scales.dtype == torch.float32
    assert torch.equal(ints.scales, torch.full((2, 128), 1e-9))


def test_a_model_of_120_billion_parameters_fits_a_gpu(tmp_path: Path) -> None:
    """By plan: experts in MXFP4 stay what they are there."""
    write_json(tmp_path / "config.json", SHAPES["gpt-oss-120b"])
    decoder = Decoder(ModelConfig.from_directory(tmp_path), device=torch.device("meta"), dtype=torch.bfloat16)
    parameters = dict(decoder.named_parameters())
    assert 60 * GB < sum(parameter.nbytes for parameter in parameters.values()) < 66 * GB
    # A byte of experts holds two numbers, and scales are none.
    numbers = sum(2 * part.numel() for name, part in parameters.items() if name.endswith("ints.bits"))
    assert numbers == 36 * 128 * 3 * 2880 * 2880


def test_memory_is_that_of_plain_weights(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_with(awq()))
    decoder = Decoder(ModelConfig.from_directory(tmp_path), device=torch.device("meta"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
