"""Mixtures of experts: a token's numbers beside any others, the choice of experts, and checkpoints that do not fit."""

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
from slipstream.services.models.experts import Experts, sigmoid
from slipstream.services.worker.memory import needed_for_work
from tests.harness.checkpoints import refusal, write_json, write_weights
from tests.harness.paged_model import CPU
from tests.harness.transformers_checkpoints import MIXTURES, write_by_transformers

META = torch.device("meta")
LAST = 3


def experts_of(decoder: Decoder) -> Experts:
    """The experts of the last layer."""
    experts = decoder.layers[LAST].experts
    assert isinstance(experts, Experts)
    return experts


def some_rows(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(7))


@pytest.fixture(params=MIXTURES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_by_transformers(tmp_path / "it", request.param, seed=2, has_tokenizer=False)


def test_a_token_has_the_same_bits_beside_any_others(path: Path) -> None:
    layer = load_decoder(path, device=CPU, dtype=torch.float32).layers[LAST]
    rows = some_rows(41)
    together = layer._mlp(rows)
    for begin, end in ((0, 1), (40, 41), (3, 5), (7, 20), (1, 41)):
        assert torch.equal(layer._mlp(rows[begin:end].clone()), together[begin:end])
    assert torch.equal(layer._mlp(rows.flip(0)), together.flip(0))


def test_a_sigmoid_has_the_same_bits_anywhere_in_a_tensor() -> None:
    numbers = 3 * torch.randn(500, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat([sigmoid(number[None]) for number in numbers]), sigmoid(numbers))


def test_of_equal_scores_the_lower_expert_is_taken(path: Path) -> None:
    """Also of equal groups, and where a bias makes others equal."""
    decoder = load_decoder(path, device=CPU, dtype=torch.float32, load_format=LoadFormat.DUMMY)
    experts = experts_of(decoder)
    num_chosen = decoder.config.experts.num_chosen if decoder.config.experts is not None else 0
    chosen, weights = experts.route(torch.zeros(5, 64))
    assert chosen.tolist() == [list(range(num_chosen))] * 5
    assert len(set(weights.flatten().tolist())) == 1
    assert weights.dtype == torch.float32
    if experts.choice_bias is not None:
        experts.choice_bias[-num_chosen:] += 1.0
        raised = experts.route(torch.zeros(1, 64))[0][0].tolist()
        assert raised[0] == len(experts.choice_bias) - num_chosen
        assert raised == sorted(raised)


def test_routing_keeps_its_digits_in_bfloat16(tmp_path: Path) -> None:
    """Two experts whose logits differ by less than bfloat16 tells apart."""
    path = write_by_transformers(tmp_path / "it", "mixtral", has_tokenizer=False)
    weights = load_file(path / "model.safetensors")
    router = weights[f"model.layers.{LAST}.block_sparse_moe.gate.weight"].zero_()
    router[3], router[4] = 0.25, 0.25001
    write_weights(path, weights)
    experts = experts_of(load_decoder(path, device=CPU, dtype=torch.bfloat16))
    chosen, of_chosen = experts.route(torch.ones(1, 64, dtype=torch.bfloat16))
    assert chosen.tolist() == [[4, 3]]
    assert of_chosen[0, 0] > of_chosen[0, 1]


def test_all_experts_count_in_memory(tmp_path: Path) -> None:
    """Those that a token takes change what a step needs, and nothing of the weights."""
    sizes = MIXTURES["qwen3-moe"] | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 1}
    made = []
    for number in (1, 4):
        write_json(tmp_path / "config.json", sizes | {"num_experts_per_tok": number, "moe_intermediate_size": 4096})
        config = ModelConfig.from_directory(tmp_path)
        decoder = Decoder(config, device=META, dtype=torch.bfloat16)
        num_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
        made.append((num_bytes, needed_for_work(config, torch.bfloat16).work_per_token))
    (first, little), (second, more) = made
    assert first == second
    assert first > 8 * 3 * 4096 * 64 * 2, "the experts of one layer"
    assert more - little >= 3 * 3 * 4096 * 2


def of_mixture(name: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return MIXTURES[name] | {"architectures": [architecture]} | changes


ROUTED, QWEN, OSS = (
    ("glm4-moe", "Glm4MoeForCausalLM"),
    ("qwen2-moe", "Qwen2MoeForCausalLM"),
    ("gpt-oss", "GptOssForCausalLM"),
)


@pytest.mark.parametrize(
    ("family", "name", "value", "accepted"),
    [
        (QWEN, "num_experts", 0, "an integer from 1 to 4096"),
        (QWEN, "num_experts", 10**9, "an integer from 1 to 4096"),
        (QWEN, "num_experts_per_tok", 9, "an integer from 1 to 8"),
        (QWEN, "moe_intermediate_size", "24", "an integer from 1 to 1048576"),
        (QWEN, "shared_expert_intermediate_size", -1, "an integer from 1 to 1048576"),
        (QWEN, "norm_topk_prob", 1, "true or false"),
        (QWEN, "mlp_only_layers", [4], "a list of layers below num_hidden_layers = 4"),
        (QWEN, "decoder_sparse_step", 0, "an integer from 1 to 4"),
        (QWEN, "use_sliding_window", True, "none with this architecture"),
        (ROUTED, "n_group", 3, "a divisor of n_routed_experts = 8, with 2 in each group"),
        (ROUTED, "n_group", 8, "a divisor of n_routed_experts = 8, with 2 in each group"),
        (ROUTED, "topk_group", 5, "an integer from 1 to 4"),
        (ROUTED, "num_experts_per_tok", 5, "an integer from 1 to 4"),
        (ROUTED, "routed_scaling_factor", 1e30, "a number from 1/32768 to 32768"),
        (ROUTED, "first_k_dense_replace", 5, "an integer from 0 to num_hidden_layers = 4"),
        (ROUTED, "n_shared_experts", 65, "an integer from 1 to 64"),
        (OSS, "num_local_experts", True, "an integer from 1 to 4096"),
        (OSS, "swiglu_limit", -7.0, "a positive number"),
    ],
)
def test_settings_that_do_not_fit(
    tmp_path: Path, family: tuple[str, str], name: str, value: object, accepted: str
) -> None:
    write_json(tmp_path / "config.json", of_mixture(*family, **{name: value}))
    message = refusal(tmp_path)
    assert message.startswith(f"config.json: {name}: got {value!r}, ")
    assert message.endswith(f"supported: {accepted}")


class TestTensors:
    """Nothing takes memory before they are refused."""

    @pytest.fixture(autouse=True)
    def _no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Decoder, "__init__", lambda *_, **__: pytest.fail("a decoder is made"))

    def changed(self, path: Path, name: str, tensor: torch.Tensor | None) -> str:
        """Returns how the checkpoint is refused with another tensor, or without it."""
        weights = load_file(path / "model.safetensors")
        del weights[name]
        write_weights(path, weights | ({} if tensor is None else {name: tensor}))
        return refusal(path)

    @pytest.mark.parametrize(
        ("name", "tensor", "expected"),
        [
            ("experts.7.up_proj.weight", None, "missing tensors: {}; config.json asks for them"),
            ("experts.7.up_proj.weight", torch.zeros(23, 64), "{}: got shape [23, 64], config.json asks for [24, 64]"),
            ("experts.0.down_proj.weight", torch.zeros(64, 24, dtype=torch.int32), "{}: got dtype I32, supported: F32"),
            ("gate.weight", torch.zeros(9, 64), "{}: got shape [9, 64], config.json asks for [8, 64]"),
            ("gate.e_score_correction_bias", torch.zeros(7), "{}: got shape [7], config.json asks for [8]"),
        ],
    )
    def test_do_not_fit_the_config(self, tmp_path: Path, name: str, tensor: torch.Tensor | None, expected: str) -> None:
        path = write_by_transformers(tmp_path / "it", "glm4-moe", has_tokenizer=False)
        name = f"model.layers.3.mlp.{name}"
        assert expected.format(name) in self.changed(path, name, tensor)

    def test_are_more_than_the_config_has(self, tmp_path: Path) -> None:
        path = write_by_transformers(tmp_path / "it", "olmoe", has_tokenizer=False)
        config = MIXTURES["olmoe"] | {"architectures": ["OlmoeForCausalLM"], "num_experts": 7}
        write_json(path / "config.json", config)
        assert refusal(path).startswith("unknown tensors: model.layers.0.mlp.experts.7.")

    def test_stacked_ones_have_another_shape(self, tmp_path: Path) -> None:
        path = write_by_transformers(tmp_path / "it", "gpt-oss", has_tokenizer=False)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        expected = f"tensor {name}: got shape [6, 192, 64], config.json asks for [6, 64, 192]"
        assert expected in self.changed(path, name, torch.zeros(6, 192, 64))

    def test_are_not_finite(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        for name in ("gpt-oss", "mixtral"):
            path = write_by_transformers(tmp_path / name, name, has_tokenizer=False)
            weights = load_file(path / "model.safetensors")
            tensor = next(tensor for tensor in weights if "experts" in tensor and "2" in tensor)
            weights[tensor].view(-1)[-1] = torch.nan
            write_weights(path, weights)
            with pytest.raises(CheckpointError, match=rf"tensor {tensor}: got values from nan to nan"):
                load_decoder(path, device=CPU, dtype=torch.float32)
