"""A scripted pair of models accepts as often as it is told."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.benchmarks.transformers_peer import FIRST_TOKEN, Script, TransformersPeer, follow

NUM_DRAFT_TOKENS = 4


def model() -> LlamaForCausalLM:
    """A small one, with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).eval()


def test_a_model_says_what_its_script_says() -> None:
    target = model()
    script = Script.draw(64, 1.0, seed=0, device=torch.device("cpu"))
    undo = follow(target, script.tokens)
    prompt = torch.tensor([[5, 6, 7]])
    settings = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
    said = target.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert said[0, 3:].tolist() == [FIRST_TOKEN + position for position in range(3, 11)]
    undo()
    silent = target.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert silent[0, 3:].tolist() != said[0, 3:].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mean", "low", "high"), [(5.0, 4.9, 5.1), pytest.param(1.0, 0.9, 1.1, marks=pytest.mark.slow), (3.0, 2.2, 3.8)]
)
def test_assisted_generation_accepts_so_many(mean: float, low: float, high: float) -> None:
    peer = TransformersPeer(model(), num_new_tokens=101)
    measured = peer.assisted([5, 6, 7], model(), num_draft_tokens=NUM_DRAFT_TOKENS, mean_accept_length=mean)
    assert low <= measured.mean_accept_length <= high
