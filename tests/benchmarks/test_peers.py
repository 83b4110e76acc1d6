"""`transformers` as a peer: generates as often as is told, and accepts as often as its script says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.benchmarks.peers import FIRST_TOKEN, REPEATS, TransformersPeer, draw_script, follow

PROMPT = [5, 6, 7]
NUM_NEW_TOKENS = 40


def model(vocab_size: int = 2048, **config: Any) -> Any:
    """A small model with random weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **{"num_hidden_layers": 1, **sizes, **config})).eval()


@pytest.fixture
def target() -> Any:
    """A small model whose tokens vary."""
    torch.manual_seed(3)
    return model(256, num_hidden_layers=2, initializer_range=1.0)


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
    measured = TransformersPeer(target, PROMPT, NUM_NEW_TOKENS).compiled()
    hook.remove()
    timed = [expected[0], *expected]
    assert said == [*expected, *expected, *(REPEATS * timed)]
    assert len(measured["repeats"]) == REPEATS
    assert measured["mean_accept_length"] == 1.0


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
    peer = TransformersPeer(target, PROMPT, NUM_NEW_TOKENS)
    peer.assisted(assistant, num_draft_tokens=4, mean_accept_length=None)
    assert lengths == [32, *(REPEATS * [1, NUM_NEW_TOKENS])]


def test_a_model_says_what_its_script_says() -> None:
    target = model()
    tokens, _ = draw_script(64, 1.0, seed=0)
    undo = follow(target, tokens)
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
def test_assisted_generation_accepts_as_often_as_its_script_says(mean: float, low: float, high: float) -> None:
    peer = TransformersPeer(model(), [5, 6, 7], 101)
    measured = peer.assisted(model(), num_draft_tokens=4, mean_accept_length=mean)
    assert low <= measured["mean_accept_length"] <= high
