"""The decoder against transformers, in float32: each family, with and without sliding windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.common.errors import CheckpointError
from slipstream.common.wire.step import FINAL_NORM
from slipstream.services.models import decoder
from slipstream.services.models.attention import TorchAttention
from slipstream.services.models.checkpoint import load_decoder
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.paged_kv import PagedKV
from tests.harness.checkpoints import FAMILIES, write_checkpoint, write_json
from tests.harness.paged_model import CPU, PagedModel, random_tokens

pytestmark = pytest.mark.sampled_module(20)

WINDOW = 7
"""Less than a chunk, and no multiple of a page."""
CHUNK = 16
BY_LAYER = {"use_sliding_window": True, "sliding_window": WINDOW}
LAYER_TYPES = ["sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
"""Texts of the tests are longer than these original positions."""
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.8, 2.0, 4.0],
    "long_factor": [1.0, 1.5, 3.0, 8.0, 16.0, 32.0],
}
PHI4_MINI = {"partial_rotary_factor": 0.75, "rope_parameters": None, "rope_scaling": LONGROPE, "sliding_window": 4096}

LLAMAS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "one-kv-head": {"num_key_value_heads": 1},
    "no-grouping": {"num_key_value_heads": 4},
    "head-size-of-its-own": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3-rope": {"rope_parameters": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 64}},
    "older-config": {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "several-files": {"num_files": 3},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}
BY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral"},
    "mistral-window": {"family": "mistral", "sliding_window": WINDOW},
    "mistral-window-of-2": {"family": "mistral", "sliding_window": 2, "num_hidden_layers": 3},
    "qwen2": {"family": "qwen2"},
    "qwen2-head-dim": {"family": "qwen2", "head_dim": 24},
    "qwen2-window-from-layer-1": {"family": "qwen2", **BY_LAYER, "max_window_layers": 1},
    "qwen2-window-nowhere": {"family": "qwen2", **BY_LAYER, "max_window_layers": 2},
    "qwen2-layer-types": {"family": "qwen2", **BY_LAYER, "layer_types": LAYER_TYPES},
    "qwen3": {"family": "qwen3"},
    "qwen3-biases": {"family": "qwen3", "attention_bias": True},
    "qwen3-window": {"family": "qwen3", **BY_LAYER, "max_window_layers": 0},
    "qwen3-layer-types": {"family": "qwen3", **BY_LAYER, "layer_types": LAYER_TYPES},
    "llama-tied-llama3": {"family": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "llama-yarn": {"family": "llama", "rope_parameters": YARN},
    "mistral-window-yarn": {"family": "mistral", "sliding_window": WINDOW, "rope_parameters": YARN},
    "qwen2-yarn": {"family": "qwen2", "rope_parameters": None, "rope_theta": 1e6, "rope_scaling": YARN},
    "qwen3-yarn": {"family": "qwen3", "rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}},
    "phi3": {"family": "phi3"},
    "phi3-window": {"family": "phi3", "sliding_window": WINDOW},
    "phi3-partial-tied": {"family": "phi3", "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    "phi3-longrope": {"family": "phi3", "tie_word_embeddings": True, "max_position_embeddings": 2048, **PHI4_MINI},
}
VARIANTS = LLAMAS | BY_FAMILY


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", seed=11, has_tokenizer=False, **VARIANTS[request.param])


def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_logits_are_those_of_transformers(variant: Path) -> None:
    prompts = [random_tokens(40, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        expected = reference(variant)(torch.tensor(prompts)).logits
    model = PagedModel(variant)
    logits = model.run(model.batch([(0, prompt) for prompt in prompts]))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    in_chunks = model.prefill(prompts[0], chunk=CHUNK, row=3)
    torch.testing.assert_close(in_chunks, expected[0], atol=1e-4, rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", BY_FAMILY, indirect=True)
def test_greedy_tokens_are_those_of_transformers_in_batches_of_different_lengths(variant: Path) -> None:
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 19, 30)]
    theirs = reference(variant)
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        output = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert all(len(set(tokens)) >= 20 for tokens in expected), "the reference repeats itself, which proves little"
    assert PagedModel(variant, seed=3).greedy(prompts, 64) == expected
    assert PagedModel(variant, seed=4).greedy(prompts, 64, chunk=CHUNK) == expected
    assert PagedModel(variant, seed=5).greedy(prompts[2:3], 64) == expected[2:3]


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-layer-types"])
def test_a_window_leaves_padding_and_what_is_past_a_limit_finite(tmp_path: Path, name: str) -> None:
    model = PagedModel(write_checkpoint(tmp_path / "it", **VARIANTS[name]))
    rows = [(0, random_tokens(30, seed=1)), (0, random_tokens(4, seed=2))]
    batch = model.batch(rows)
    expected = model.run(batch)
    disturbed = replace(
        batch,
        limits=torch.tensor([20, 4]),
        positions=torch.where(batch.is_valid, batch.positions, 2**40),
    )
    for bound in (None, 20):
        logits = model.run(replace(disturbed, max_kv_len=bound))
        torch.testing.assert_close(logits[0, :20], expected[0, :20], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits[1, :4], expected[1, :4], atol=1e-5, rtol=1e-5)
        assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_rejected_drafts_leave_no_trace(tmp_path: Path, name: str) -> None:
    model = PagedModel(write_checkpoint(tmp_path / "it", **VARIANTS[name]))
    prompt = random_tokens(20, seed=8)
    expected = model.run(model.batch([(0, prompt)]))[0, 12:]
    model.run(model.batch([(0, prompt[:12])], first_row=1))
    model.run(model.batch([(12, random_tokens(5, seed=9))], first_row=1))
    logits = model.run(model.batch([(12, prompt[12:])], first_row=1))[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ()),
        ("mistral", ()),
        ("mistral-window", (7, 7)),
        ("qwen2", ()),
        ("qwen2-window-from-layer-1", (None, 7)),
        ("qwen2-window-nowhere", ()),
        ("qwen3-window", (7, 7)),
        ("qwen3-layer-types", (7, None)),
    ],
)
def test_sliding_windows_are_data(tmp_path: Path, name: str, expected: tuple[int | None, ...]) -> None:
    path = write_checkpoint(tmp_path / "it", has_tokenizer=False, **VARIANTS[name])
    config = ModelConfig.from_directory(path)
    assert config.sliding_windows == expected
    assert tuple(config.sliding_window(layer) for layer in range(2)) == (expected or (None, None))


@pytest.mark.parametrize("name", ["llama", "phi3-longrope"])
def test_weights_in_several_files_are_the_same_model(tmp_path: Path, name: str) -> None:
    changes = {**VARIANTS[name], "seed": 4, "has_tokenizer": False}
    one, several = (write_checkpoint(tmp_path / str(count), num_files=count, **changes) for count in (1, 3))
    assert not (several / "model.safetensors").exists()
    batches = [(0, random_tokens(30, seed=1))]
    logits = [model.run(model.batch(batches)) for model in (PagedModel(one), PagedModel(several))]
    assert torch.equal(*logits)


def test_missing_norms_of_heads_are_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "it", family="mistral", head_dim=32, has_tokenizer=False)
    write_json(path / "config.json", FAMILIES["qwen3"])
    with pytest.raises(CheckpointError, match=r"missing tensors: model.layers.0.self_attn.q_norm.weight, "):
        load_decoder(path, device=CPU, dtype=torch.float32)


def test_aux_hidden_states_are_the_inputs_of_layers(checkpoint: Path, model: PagedModel) -> None:
    prompt = random_tokens(20, seed=5)
    states: list[torch.Tensor] = []
    theirs = reference(checkpoint)
    for layer in theirs.model.layers:
        layer.register_forward_pre_hook(lambda _, args, states=states: states.append(args[0]))
    theirs.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.no_grad():
        theirs(torch.tensor([prompt]))
    output = model.output(model.batch([(0, prompt)]), aux_layers=(2, 0, FINAL_NORM, 1))
    assert output.aux is not None
    expected = torch.cat([states[2], states[0], theirs.model.norm(states[2]), states[1]], dim=-1)
    torch.testing.assert_close(output.aux, expected, atol=1e-4, rtol=0)
    assert model.output(model.batch([(0, prompt)])).aux is None


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunked_prefill_equals_whole_prefill(checkpoint: Path, chunk: int) -> None:
    prompt = random_tokens(33, seed=6)
    whole, chunked = PagedModel(checkpoint), PagedModel(checkpoint)
    expected = whole.run(whole.batch([(0, prompt)]))
    parts = [
        chunked.run(chunked.batch([(start, prompt[start : start + chunk])])) for start in range(0, len(prompt), chunk)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-5)
    pages = [run.cache.rows[1].view(run.cache.num_pages, -1)[run.page_table[0, :8]] for run in (whole, chunked)]
    torch.testing.assert_close(pages[0], pages[1], atol=1e-5, rtol=1e-5)


def test_layers_share_what_attention_prepares(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(TorchAttention):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    batch = model.batch([(0, [1, 2, 3])])
    expected = model.output(batch).hidden
    monkeypatch.setattr(decoder, "TorchAttention", Counted)
    hidden = model.decoder(batch, model.cache).hidden
    assert len(made) == 1, "what layers share is computed once"
    torch.testing.assert_close(hidden, expected)


def test_nothing_is_read_back_from_other_devices(model: PagedModel) -> None:
    """CUDA graphs need this. On the meta device tensors have no values that could be read."""
    meta, config = torch.device("meta"), model.decoder.config
    decoder = Decoder(config, device=meta, dtype=torch.bfloat16)
    cache = PagedKV(config, num_pages=9, page_size=16, device=meta, dtype=torch.bfloat16)
    batch = model.batch([(0, [1, 2, 3]), (5, [4])])
    names = ("tokens", "positions", "is_valid", "page_table", "limits")
    output = decoder(replace(batch, **{name: getattr(batch, name).to(meta) for name in names}), cache, aux_layers=(1,))
    assert output.hidden.shape == output.aux.shape == (2, 3, 64)
    assert output.hidden.dtype == torch.bfloat16
    assert decoder.logits(output.hidden).dtype == torch.float32
