"""Packed weights: each is what its formula says, rounded once; and one clear line for what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.benchmarks.models import SHAPES
from slipstream.common.errors import CheckpointError
from slipstream.services.models.checkpoint import LoadFormat, load_decoder
from slipstream.services.models.config import ALONE, ModelConfig, Rank
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.experts import Experts
from slipstream.services.models.head_config import MtpConfig
from slipstream.services.models.packed import Quantised
from slipstream.services.models.packed_ints import PackedInts
from slipstream.services.models.quantization import PackedWeights, Packing
from slipstream.services.models.sharding import sharded
from tests.harness.checkpoints import LLAMA, refusal, write_checkpoint, write_json, write_weights
from tests.harness.packed_checkpoints import FP4, LAYOUTS, awq, gptq, keep_packed, pack, pack_experts, packed
from tests.harness.paged_model import CPU, PagedModel, random_tokens
from tests.harness.transformers_checkpoints import write_by_transformers

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "attention_bias": True}
Q_PROJ = "model.layers.1.self_attn.q_proj"
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


def test_experts_stay_packed_where_all_of_a_layer_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection that is plain makes its layer's experts plain, and leaves those of others."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    path = write_by_transformers(tmp_path / "it", "qwen3-moe", has_tokenizer=False, **sizes)
    name = "layers.2.mlp.experts.3"
    worth = pack(path, "awq", is_left=(f"{name}.up_proj",))
    keep_packed(monkeypatch)
    decoder = load_decoder(path, device=CPU, dtype=torch.bfloat16)
    experts = [layer.experts for layer in decoder.layers if layer.experts is not None]
    assert [each.gate_up is None for each in experts] == [True, False, True]
    expected = torch.cat([worth[f"model.{name}.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(experts[1].gate_up[3], expected.to(torch.bfloat16))


@pytest.mark.parametrize("shape", ["gpt-oss-20b-mxfp4", "qwen3-30b-a3b-w4"])
def test_random_weights_of_packed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    sizes = {"num_hidden_layers": 1, "vocab_size": 128, "num_local_experts": 4, "num_experts": 8}
    write_json(tmp_path / "config.json", SHAPES[shape] | sizes | {"num_experts_per_tok": 2, "eos_token_id": 1})
    keep_packed(monkeypatch)
    decoder = load_decoder(tmp_path, device=CPU, dtype=torch.bfloat16, load_format=LoadFormat.DUMMY)
    experts = decoder.layers[0].experts
    assert isinstance(experts, Experts)
    for ints in (experts.gate_up_ints, experts.down_ints):
        assert ints is not None
        codes, scale = ints.bits[:8].int() & 15, ints.scales[0, 0].float()
        numbers = torch.tensor(FP4)[codes] * 2 ** (scale - 127) if ints.is_mxfp4 else (codes - 8) * scale
        assert 0.7 < numbers.std() * ints.num_columns**0.5 < 1.4


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


def test_integers_leave_stacked_experts_plain(tmp_path: Path) -> None:
    path = write_by_transformers(tmp_path / "it", "gpt-oss", has_tokenizer=False)
    assert_worth(path, pack(path, "gptq"))
    weights, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.experts.down_proj"
    del weights[name]
    write_weights(path, weights)
    assert refusal(path) == f"missing tensors: {name}; config.json asks for them"


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
        ({"quant_method": "mxfp4", "group_size": 64}, "group_size: got 64, supported: 32, None"),
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
            ("packed", "weight_scale", torch.full((128, 2), 3e37), "got scales that are NaN or infinite, or make"),
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

    def test_experts_in_mxfp4(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_by_transformers(tmp_path / "it", "gpt-oss", has_tokenizer=False)
        pack_experts(path)
        weights, name = load_file(path / "model.safetensors"), "model.layers.2.mlp.experts.down_proj"
        blocks, scales = weights[f"{name}_blocks"], weights[f"{name}_scales"]
        monkeypatch.setattr(Decoder, "__init__", lambda *_, **__: pytest.fail("a decoder is made"))
        for end, value, expected in (
            ("_scales", None, "missing tensors: {}; config.json asks for them"),
            ("_scales", scales[..., :1], "{}: got shape [6, 64, 1], config.json asks for [6, 64, 3]"),
            ("_scales", scales.float(), "{}: got dtype F32, supported: U8 (quantization_config"),
            ("_scales", scales.index_fill(1, torch.tensor(5), 252), "{}: got exponents of 252, supported: at most 251"),
            ("_scales", scales.index_fill(1, torch.tensor(5), 255), "{}: got exponents of 255, supported: at most 251"),
            ("_blocks", torch.cat([blocks, blocks[:1]]), "{}: got shape [7, 64, 3, 16], config.json asks for [6, 64, "),
            ("", torch.zeros(6, 96, 64), "{}_blocks: got dtype U8, supported: F32, F16, BF16 (no quantised weights)"),
        ):
            changed = weights | ({} if value is None else {f"{name}{end}": value.contiguous()})
            if value is None:
                del changed[f"{name}{end}"]
            write_weights(path, changed)
            assert expected.format(f"{name}{end}") in refusal(path)


def test_scales_that_float16_would_round_are_float32() -> None:
    layout = PackedWeights(packing=Packing.GPTQ, group_size=128)
    ints = PackedInts(layout, 128, 256, device=CPU, dtype=torch.bfloat16)
    numbers = torch.zeros(128, 256, dtype=torch.int64)
    zeros, groups = torch.zeros(128, 2, dtype=torch.int64), torch.arange(256) // 128
    ints.fill(0, Quantised(numbers, zeros, torch.full((128, 2), 1e-9), groups))
    assert ints.scales.dtype == torch.float32
    assert torch.equal(ints.scales, torch.full((2, 128), 1e-9))


def plan(path: Path, shape: str, rank: Rank = ALONE) -> dict[str, torch.Tensor]:
    """The parameters of a model with kernels, on a device without memory."""
    write_json(path / "config.json", SHAPES[shape])
    config = sharded(ModelConfig.from_directory(path), rank)
    return dict(Decoder(config, device=torch.device("meta"), dtype=torch.bfloat16).named_parameters())


@pytest.mark.parametrize(
    ("shape", "gigabytes"), [("gpt-oss-20b-mxfp4", 13.77), ("gpt-oss-120b", 65.28), ("qwen3-30b-a3b-w4", 18.28)]
)
def test_packed_experts_take_what_they_are(tmp_path: Path, shape: str, gigabytes: float) -> None:
    """So that 120 billion parameters fit a GPU of 141 GB, and one of 80."""
    assert sum(parameter.nbytes for parameter in plan(tmp_path, shape).values()) / 1e9 == pytest.approx(
        gigabytes, abs=0.01
    )


def test_ranks_have_plain_weights(tmp_path: Path) -> None:
    names = {name.rpartition(".")[2] for name in plan(tmp_path, "qwen3-30b-a3b-w4", Rank(0, 2))}
    assert names == {"embedding", "weight", "gate_up", "down"}


def test_memory_is_that_of_plain_weights(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_with(awq()))
    decoder = Decoder(ModelConfig.from_directory(tmp_path), device=torch.device("meta"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
