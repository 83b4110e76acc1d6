"""Families beyond Llama's: logits and settings as in transformers, and what their `config.json` may not say."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import CheckpointError
from slipstream.services.factory import describe_verify
from slipstream.services.models.checkpoint import LoadFormat, load_decoder
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder, paired_dimensions
from slipstream.services.models.families import FAMILIES
from slipstream.services.models.head_config import MtpConfig
from slipstream.services.models.json_files import ConfigFields, read_json
from slipstream.services.worker.config import WorkerConfig
from tests.harness.checkpoints import refusal, write_json, write_weights
from tests.harness.mutations import is_refused
from tests.harness.paged_model import CPU, PagedModel, random_tokens
from tests.harness.sampling import examples
from tests.harness.transformers_checkpoints import VARIANTS, load_reference, write_by_transformers

CHUNK = 16
MULTIMODAL = ("gemma3-multimodal", "mistral3-multimodal")


def logits_of(path: Path, prompt: list[int]) -> torch.Tensor:
    model = PagedModel(path)
    return model.run(model.batch([(0, prompt)]))


def test_every_further_family_is_compared() -> None:
    compared = {variant["model_type"] for variant in VARIANTS.values()}
    elsewhere = {"llama", "mistral", "qwen2", "qwen3", "phi3"}
    assert {family.model_type for family in FAMILIES.values()} <= compared | elsewhere


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    path = write_by_transformers(tmp_path / "it", name, seed=11, has_tokenizer=False)
    prompts = [random_tokens(60, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        expected = load_reference(path)(torch.tensor(prompts)).logits
    model = PagedModel(path)
    torch.testing.assert_close(model.run(model.batch([(0, prompt) for prompt in prompts])), expected, atol=1e-4, rtol=0)
    in_chunks = model.prefill(prompts[0], chunk=CHUNK, row=3)
    torch.testing.assert_close(in_chunks, expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_text_part_of_a_multimodal_model_is_loaded_and_said(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some versions of transformers wrote `model.language_model.*` in place of `language_model.model.*`."""
    path = write_by_transformers(tmp_path / "it", name, seed=3)
    prompt = random_tokens(30, seed=1)
    with caplog.at_level(logging.INFO, logger="slipstream"):
        expected = logits_of(path, prompt)
    architecture = read_json(path / "config.json")["architectures"][0]
    assert f"of {architecture} only the text part is loaded: requests have no images" in caplog.text
    assert describe_verify(WorkerConfig(model=path), HostDevice(), 0).model == "it (text part)"
    weights = load_file(path / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in weights)
    renamed = {
        f"model.{name}".replace("model.language_model.model.", "model.language_model.").replace(
            "model.language_model.lm_head.", "lm_head."
        ): tensor
        for name, tensor in weights.items()
    }
    write_weights(path, renamed)
    assert torch.equal(logits_of(path, prompt), expected)
    renamed.pop("model.language_model.norm.weight")
    write_weights(path, renamed)
    assert refusal(path) == "missing tensors: model.norm.weight; config.json asks for them"


@pytest.mark.parametrize("name", ["gemma3", "granite", "glm4"])
def test_random_weights_need_no_more_than_settings(tmp_path: Path, name: str) -> None:
    path = write_by_transformers(tmp_path / "it", name)
    (path / "model.safetensors").unlink()
    decoder = load_decoder(path, device=CPU, dtype=torch.bfloat16, load_format=LoadFormat.DUMMY)
    assert decoder.embedding.dtype == torch.bfloat16
    assert decoder.norm.weight.dtype == (torch.float32 if name == "gemma3" else torch.bfloat16)


def test_norms_with_an_offset_keep_the_digits_of_their_weights(tmp_path: Path) -> None:
    """In bfloat16 the sum with 1 would lose most digits of a small weight."""
    path = write_by_transformers(tmp_path / "it", "gemma2", seed=1)
    weights = load_file(path / "model.safetensors")
    decoder = load_decoder(path, device=CPU, dtype=torch.bfloat16)
    assert torch.equal(decoder.norm.weight, weights["model.norm.weight"] + 1.0)
    normed = decoder.norm(torch.randn(3, 64).to(torch.bfloat16))
    assert normed.dtype == torch.bfloat16


def test_interleaved_pairs() -> None:
    rope = config_of({"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "head_dim": 8}).rope
    assert paired_dimensions(rope, 8).tolist() == [0, 2, 4, 5, 1, 3, 6, 7]
    assert paired_dimensions(replace(rope, partial_rotary_factor=1.0), 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def config_of(values: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_fields(ConfigFields(Path("there"), values), values["architectures"][0])


ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "glm": "GlmForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
SETTINGS: list[dict[str, Any]] = [
    *({"model_type": model_type} for model_type in ARCHITECTURES if model_type != "glm4_moe"),
    {"model_type": "glm4_moe", "head_dim": 128},
    {"model_type": "gemma3_text", "rope_theta": 5e5, "rope_local_base_freq": 500.0, "sliding_window_pattern": 3},
    {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 512},
    {"model_type": "olmo3", "rope_theta": 5e5, "num_hidden_layers": 8},
    {"model_type": "olmo3", "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
    | {"original_max_position_embeddings": 256},
    {"model_type": "smollm3", "no_rope_layer_interval": 3, "num_hidden_layers": 7},
    {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9},
    {"model_type": "smollm3", "no_rope_layers": [1] * 36},
    {"model_type": "glm4", "partial_rotary_factor": 0.25, "attention_bias": False},
    {"model_type": "ministral", "sliding_window": None},
]


@pytest.mark.parametrize("values", SETTINGS, ids=str)
def test_settings_are_read_as_transformers_reads_them(tmp_path: Path, values: dict[str, Any]) -> None:
    model_type = values["model_type"]
    write_json(tmp_path / "config.json", values | {"architectures": [ARCHITECTURES[model_type]]})
    ours, theirs = ModelConfig.from_directory(tmp_path), AutoConfig.from_pretrained(tmp_path)
    num_layers = theirs.num_hidden_layers
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * num_layers
    windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert ours.sliding_windows == (windows if any(windows) else ())
    ropes = theirs.rope_parameters
    for layer, kind in enumerate(kinds):
        rope = ours.rope_of(layer)
        if not getattr(theirs, "no_rope_layers", [1] * num_layers)[layer]:
            assert rope is None
            continue
        expected = ropes.get(kind, ropes)
        assert rope is not None
        found = (rope.theta, rope.rope_type, rope.partial_rotary_factor)
        assert found == (expected["rope_theta"], expected["rope_type"], expected.get("partial_rotary_factor", 1.0))
        assert expected.get("factor", 1.0) == rope.factor
    for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.num_layers, ours.num_heads) == (num_layers, theirs.num_attention_heads)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.score_cap == (theirs.attn_logit_softcapping if model_type == "gemma2" else None)
    assert ours.logit_cap == getattr(theirs, "final_logit_softcapping", None)
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    assert ours.eos_token_ids == set(ends) - {None}
    if ours.experts is not None:
        experts = ours.experts
        number = theirs.num_experts if hasattr(theirs, "num_experts") else theirs.num_local_experts
        assert (experts.num_experts, experts.num_chosen) == (number, theirs.num_experts_per_tok)
        assert experts.width == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert experts.is_normalised == getattr(theirs, "norm_topk_prob", model_type == "mixtral")
        assert sum(experts.layers) == num_layers - getattr(theirs, "first_k_dense_replace", 0)
        shared = getattr(theirs, "shared_expert_intermediate_size", 0)
        assert experts.shared_width == (experts.width if model_type == "glm4_moe" else shared)


@pytest.mark.parametrize(
    ("model_type", "name", "value", "accepted"),
    [
        ("gemma2", "hidden_activation", "gelu", "'gelu_pytorch_tanh'"),
        ("gemma2", "query_pre_attn_scalar", 0, "a positive number"),
        ("gemma2", "attn_logit_softcapping", -1.0, "a positive number"),
        ("gemma2", "final_logit_softcapping", "30", "a positive number"),
        ("gemma2", "use_bidirectional_attention", True, "none with this architecture"),
        ("gemma2", "sliding_window", None, "an integer from 1 to 16777216"),
        ("gemma3_text", "attn_logit_softcapping", 50.0, "none with this architecture"),
        ("gemma3_text", "sliding_window_pattern", 0, "an integer from 1 to 1024"),
        ("gemma3_text", "rope_local_base_freq", -1, "a positive number"),
        ("gemma3_text", "layer_types", ["full_attention"], "a type for each of 26 layers"),
        ("smollm3", "no_rope_layers", [1, 2], "0 or 1 for each of 36 layers"),
        ("smollm3", "no_rope_layers", 4, "0 or 1 for each of 36 layers"),
        ("granite", "residual_multiplier", 0, "a positive number"),
        ("granite", "attention_multiplier", None, "a positive number"),
        ("granite", "embedding_multiplier", 1e30, "a number from 1/32768 to 32768"),
        ("granite", "logits_scaling", 1e-30, "a number from 1/32768 to 32768"),
        ("gemma2", "final_logit_softcapping", 1e300, "a number from 1/32768 to 32768"),
        ("gemma2", "query_pre_attn_scalar", 1e-300, "a number from 1/32768 to 32768"),
        ("gemma3_text", "rope_parameters", {"full_attention": 5}, "an object"),
        ("granite", "sliding_window", 7, "none with this architecture"),
        ("glm4", "partial_rotary_factor", 0.001, "a positive number"),
        ("olmo3", "layer_types", ["chunked_attention"] * 32, "full_attention, sliding_attention"),
    ],
)
def test_bad_fields_are_named(model_type: str, name: str, value: object, accepted: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_of({"model_type": model_type, "architectures": [ARCHITECTURES[model_type]], name: value})
    message = str(caught.value)
    if name == "partial_rotary_factor":
        accepted = "a part of head_dim = 128 that has an even number of dimensions"
        name = f"rope_parameters.{name}"
    if name == "rope_parameters":
        name = "rope_parameters.full_attention"
    assert message.startswith(f"there: config.json: {name}: got ")
    assert message.endswith(f", supported: {accepted}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    ["gemma3", "gemma3-multimodal", "olmo3", "smollm3-windows", "granite", "glm4", "qwen2-moe", "dots1", "gpt-oss"],
)
def test_changed_settings_are_read_or_refused(tmp_path: Path, name: str) -> None:
    """Only `CheckpointError` is raised, whatever the file holds; a failure names the seed of its change."""
    path = write_by_transformers(tmp_path / "it", name, has_tokenizer=False)

    def read() -> object:
        config = ModelConfig.from_directory(path)
        return config, Decoder(config, device=torch.device("meta"), dtype=torch.float32)

    num_refused = sum(is_refused(path / "config.json", read, seed) for seed in range(examples(80)))
    assert num_refused > examples(80) // 4
    read()


def test_modules_for_several_tokens_need_layers_as_llamas(tmp_path: Path) -> None:
    values = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "num_nextn_predict_layers": 1}
    write_json(tmp_path / "config.json", values)
    with pytest.raises(CheckpointError, match=r"architectures: got .*, supported: layers as Llama's, with multi-token"):
        MtpConfig.from_directory(tmp_path)
