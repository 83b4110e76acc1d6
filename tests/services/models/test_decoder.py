"""The decoder against transformers, in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.common.worker.step import FINAL_NORM
from slipstream.services.models import decoder
from slipstream.services.models.attention import PagedKV, TorchAttention
from slipstream.services.models.decoder import Decoder
from tests.harness.checkpoints import write_checkpoint
from tests.harness.paged_model import PagedModel, random_tokens

if TYPE_CHECKING:
    from pathlib import Path

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "one-kv-head": {"num_key_value_heads": 1},
    "no-grouping": {"num_key_value_heads": 4},
    "head-size-of-its-own": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "older-config": {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "several-files": {"num_files": 3},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", seed=7, **VARIANTS[request.param])


def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_logits_are_those_of_transformers(variant: Path) -> None:
    prompts = [random_tokens(40, seed=seed) for seed in (1, 2)]
    model = PagedModel(variant)
    with torch.no_grad():
        expected = reference(variant)(torch.tensor(prompts)).logits
    logits = model.run(model.batch([(0, prompt) for prompt in prompts]))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_greedy_tokens_are_those_of_transformers_in_batches_of_different_lengths(checkpoint: Path) -> None:
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 19, 30)]
    theirs = reference(checkpoint)
    expected = []
    for prompt in prompts:
        output = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert all(len(set(tokens)) >= 24 for tokens in expected), "the reference repeats itself, which proves little"
    assert PagedModel(checkpoint, seed=3).greedy(prompts, 64) == expected
    assert PagedModel(checkpoint, seed=4).greedy(prompts[2:3], 64) == expected[2:3]


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


def test_tokens_that_were_rejected_leave_no_trace(model: PagedModel) -> None:
    prompt = random_tokens(20, seed=8)
    expected = model.run(model.batch([(0, prompt)]))[0, 12:]
    model.run(model.batch([(0, prompt[:12])], first_row=1))
    model.run(model.batch([(12, random_tokens(5, seed=9))], first_row=1))  # drafts, all wrong
    logits = model.run(model.batch([(12, prompt[12:])], first_row=1))[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


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
