"""`transformers` as a peer: its speed alone with a compiled static cache, and with an assistant."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from transformers.utils import logging as transformers_logging

from slipstream.services.models.sampler import acceptance_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

REPEATS = 5
WARM_UP_TOKENS = 32
"""For a way that compiles nothing."""
ASSISTED, COMPILED = "transformers, assisted", "transformers, compiled, static cache"
FIRST_TOKEN = 1000
NUM_TOKENS = 97
WRONG_TOKEN = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The speed of one way of generating, for one request at a time."""

    way: str
    tokens_per_second: float
    """Median over the repeats; the first token, which belongs to the prompt, is not counted."""
    repeats: tuple[float, ...]
    mean_accept_length: float
    """Tokens a forward of the target."""


def quiet() -> None:
    """Turns off progress bars and warnings, such as of arguments that assisted generation itself passes on."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load(directory: Path, *, device: torch.device, dtype: torch.dtype, is_dummy: bool) -> Any:
    """Loads a causal model, or makes one with random weights."""
    if not is_dummy:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        return model.to(device).eval()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(directory), dtype=dtype
        )
    return model.eval()


@dataclass(frozen=True, slots=True)
class Script:
    """The target's token at each position, and the assistant's guess.

    Random weights never agree, and two systems are compared fairly only if their drafts are accepted alike. So both
    models compute, and then the logits that the next tokens are taken from are replaced by those of a script.
    """

    tokens: torch.Tensor
    """[positions] int64: the target's."""
    guesses: torch.Tensor
    """[positions] int64: the assistant's."""

    @classmethod
    def draw(cls, num_positions: int, rate: float, *, seed: int, device: torch.device) -> Script:
        """Draws guesses that are right with probability `rate`, each by itself."""
        generator = torch.Generator().manual_seed(seed)
        tokens = FIRST_TOKEN + torch.arange(num_positions) % NUM_TOKENS
        is_right = torch.rand(num_positions, generator=generator) < rate
        return cls(tokens.to(device), torch.where(is_right, tokens, WRONG_TOKEN).to(device))


def follow(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """Replaces the logits of a causal model so that its token at position p is `tokens[p]`; returns the undo."""

    def force(_model: Any, _args: Any, arguments: dict[str, Any], output: Any) -> None:
        num_seen, width = arguments["attention_mask"].shape[1], output.logits.shape[1]
        # The logits of a row's last input are for the position behind all that was seen.
        said = tokens[num_seen - width + 1 : num_seen + 1]
        output.logits.fill_(0.0)
        output.logits.scatter_(2, said[None, :, None], 100.0)

    handle = model.register_forward_hook(force, with_kwargs=True)
    removed: Callable[[], None] = handle.remove
    return removed


class TransformersPeer:
    """Greedy generation of a fixed length, one request at a time."""

    def __init__(self, target: Any, *, num_new_tokens: int) -> None:
        self._target = target
        self._num_new_tokens = num_new_tokens
        self._num_forwards = 0

    def compiled(self, prompt: Sequence[int]) -> Peer:
        """Plain decoding with a static cache, which `transformers` compiles by itself on a GPU.

        One cache for all runs: with one for each, graphs would be recorded again where it lies elsewhere.
        """
        cache = StaticCache(config=self._target.config, max_cache_len=len(prompt) + self._num_new_tokens)
        settings = {"past_key_values": cache}
        # The second run uses what the first one compiled. Forwards are not counted: a hook would have the model
        # compiled again, and each forward is a token.
        warm_up = (self._num_new_tokens, self._num_new_tokens)
        return self._measure(COMPILED, prompt, settings, warm_up, is_counted=False)

    def assisted(
        self, prompt: Sequence[int], assistant: Any, *, num_draft_tokens: int, mean_accept_length: float | None
    ) -> Peer:
        """Assisted generation; with `mean_accept_length` both models follow a script that agrees as often."""
        assistant.generation_config.num_assistant_tokens = num_draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        undo = [self._target.register_forward_hook(self._count).remove]
        if mean_accept_length is not None:
            num_positions = len(prompt) + self._num_new_tokens + num_draft_tokens + 2
            rate = acceptance_rate(mean_accept_length, num_draft_tokens)
            script = Script.draw(num_positions, rate, seed=0, device=self._target.device)
            undo += [follow(self._target, script.tokens), follow(assistant, script.guesses)]
        try:
            settings = {"assistant_model": assistant}
            warm_up = (min(WARM_UP_TOKENS, self._num_new_tokens),)
            return self._measure(ASSISTED, prompt, settings, warm_up, is_counted=True)
        finally:
            for remove in undo:
                remove()

    def _measure(
        self, way: str, prompt: Sequence[int], settings: dict[str, Any], warm_up: Sequence[int], *, is_counted: bool
    ) -> Peer:
        """`warm_up`: tokens of each run before those that count."""
        rates = []
        num_forwards = 0
        for num_new_tokens in warm_up:
            self._run(prompt, num_new_tokens, settings)
        for _ in range(REPEATS):
            first, num_first = self._run(prompt, 1, settings)
            whole, num_whole = self._run(prompt, self._num_new_tokens, settings)
            rates.append((self._num_new_tokens - 1) / (whole - first))
            num_forwards += num_whole - num_first
        return Peer(
            way=way,
            tokens_per_second=median(rates),
            repeats=tuple(rates),
            mean_accept_length=REPEATS * (self._num_new_tokens - 1) / num_forwards if is_counted else 1.0,
        )

    def _run(self, prompt: Sequence[int], num_new_tokens: int, settings: dict[str, Any]) -> tuple[float, int]:
        """Returns seconds, and forwards of the target."""
        self._num_forwards = 0
        if "past_key_values" in settings:
            settings["past_key_values"].reset()
        _synchronize(self._target.device)
        started = time.perf_counter()
        ids = torch.tensor([list(prompt)], device=self._target.device)
        output = self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_new_tokens,
            min_new_tokens=num_new_tokens,
            pad_token_id=0,
            **settings,
        )
        _synchronize(self._target.device)
        seconds = time.perf_counter() - started
        assert output.shape[1] == len(prompt) + num_new_tokens, "the length is fixed"
        return seconds, self._num_forwards

    def _count(self, *_: object) -> None:
        self._num_forwards += 1


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
