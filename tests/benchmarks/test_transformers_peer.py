"""The peer generates what its model says, as often as is told and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.benchmarks.transformers_peer import REPEATS, TransformersPeer

PROMPT = [5, 6, 7]
NUM_NEW_TOKENS = 40


@pytest.fixture
def target() -> Any:
    """Small, with random weights."""
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            initializer_range=1.0,
        )
    ).eval()


def test_each_run_with_the_one_static_cache_is_as_with_a_new_one(target: Any) -> None:
    said: list[int] = []

    def listen(_model: Any, _inputs: Any, output: Any) -> None:
        said.append(int(output.logits[0, -1].argmax()))

    prompt = torch.tensor([PROMPT])
    settings = {"do_sample": False, "max_new_tokens": NUM_NEW_TOKENS, "min_new_tokens": NUM_NEW_TOKENS}
    whole = target.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings)
    expected = whole[0, len(PROMPT) :].tolist()
    assert len(set(expected)) > 5, "tokens that tell runs apart"
    hook = target.register_forward_hook(listen)
    measured = TransformersPeer(target, num_new_tokens=NUM_NEW_TOKENS).compiled(PROMPT)
    hook.remove()
    timed = [expected[0], *expected]
    assert said == [*expected, *expected, *(REPEATS * timed)]
    assert len(measured.repeats) == REPEATS
    assert measured.mean_accept_length == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_assisted_generation_is_warmed_up_with_few_tokens(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    generate = target.generate

    def counted(*arguments: Any, **settings: Any) -> Any:
        lengths.append(settings["max_new_tokens"])
        return generate(*arguments, **settings)

    monkeypatch.setattr(target, "generate", counted)
    assistant = LlamaForCausalLM(target.config).eval()
    peer = TransformersPeer(target, num_new_tokens=NUM_NEW_TOKENS)
    peer.assisted(PROMPT, assistant, num_draft_tokens=4, mean_accept_length=None)
    assert lengths == [32, *(REPEATS * [1, NUM_NEW_TOKENS])]
