"""One request at a time: this system, and `transformers` with the same target, prompt and machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import harmonic_mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from slipstream.benchmarks.models import ACCEPT_LENGTH, BUNDLED, EAGLE3, NUM_DRAFT_TOKENS, STANDALONE, write_shape
from slipstream.benchmarks.runner import DevicePlan, Names, Row, Scenario, Table, benchmark, host, run
from slipstream.benchmarks.stack import Served, Stack
from slipstream.bundled import prompts, standalone_dir, target_dir
from slipstream.cli.mps import MpsMode
from slipstream.client import AsyncClient
from slipstream.services.models.sampler import acceptance_rate

NUM_NEW_TOKENS = 256
PROMPT_TOKENS = 128
REPEATS = 5
WARM_UP_TOKENS = 32
"""For a way that compiles nothing."""
FIRST_TOKEN = 1000
NUM_TOKENS = 97
WRONG_TOKEN = 17
SHAPE_8B = "llama-3.1-8b"
DRAFTING, PLAIN = "slipstream, drafting", "slipstream, plain"
ASSISTED, COMPILED = "transformers, assisted", "transformers, compiled, static cache"
DRAFTS = {
    (BUNDLED, DRAFTING): "bundled standalone draft",
    (BUNDLED, ASSISTED): "bundled standalone draft",
    (SHAPE_8B, DRAFTING): "shape of an EAGLE-3 head, accepted by chance",
    (SHAPE_8B, ASSISTED): "shape of Llama 3.2 1B, accepted by chance",
}
"""The draft by case and way; the other ways have none. The target of a case is the same in all of its ways."""


@dataclass(frozen=True, kw_only=True)
class Plan(DevicePlan):
    """The settings of a measurement."""

    case: Names = Names.of((BUNDLED, SHAPE_8B), help="By commas; the file keeps other cases.")


class Case(NamedTuple):
    """A target, a draft for this system, and an assistant for `transformers`."""

    name: str
    target: Path
    draft: Path
    assistant: Path
    algorithm: str
    mean_accept_length: float | None
    """Drawn by chance, with random weights; None: what real weights give."""

    @classmethod
    def named(cls, name: str, folder: Path) -> Case:
        """Returns the case; shapes are written into the folder."""
        if name == BUNDLED:
            return cls(name, target_dir(), standalone_dir(), standalone_dir(), STANDALONE, None)
        target, draft, other = (write_shape(folder, one) for one in (name, f"eagle3-{name}", "llama-3.2-1b"))
        return cls(name, target, draft, other, EAGLE3, ACCEPT_LENGTH)


async def measure(case: Case, device: str, table: Table) -> None:
    """Measures all ways, one after the other; only ways with the same models are in memory together."""
    from transformers import AutoTokenizer

    prompt = AutoTokenizer.from_pretrained(case.target).encode(prompts()[0].text)
    prompt = (prompt * -(-PROMPT_TOKENS // len(prompt)))[:PROMPT_TOKENS]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    about = {
        "case": case.name,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": len(prompt),
        "num_new_tokens": NUM_NEW_TOKENS,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "host": host(),
        "hardware": host(device).partition(",")[0] if device == "cuda" else "no GPU",
    }
    await _slipstream(case, device, prompt, about, table)
    mean = case.mean_accept_length
    target, assistant = (load(path, device, dtype, is_dummy=mean is not None) for path in (case.target, case.assistant))
    peer = TransformersPeer(target, prompt, NUM_NEW_TOKENS)
    table.add(about | peer.assisted(assistant, num_draft_tokens=NUM_DRAFT_TOKENS, mean_accept_length=mean))
    table.add(about | peer.compiled())


async def _slipstream(case: Case, device: str, prompt: list[int], about: Row, table: Table) -> None:
    weights: dict[str, Any] = {"load_format": "auto" if case.mean_accept_length is None else "dummy"}
    sizes = {"slots": 1, "context_tokens": 2 * (PROMPT_TOKENS + NUM_NEW_TOKENS)}
    ways = ((DRAFTING, "draft", NUM_DRAFT_TOKENS), (PLAIN, None, None))
    scenarios = [
        Scenario(about=about | {"way": way}, draft=draft, options={**sizes, "fixed_draft_tokens": count})
        for way, draft, count in ways
    ]
    async with Stack(device=device, mps=MpsMode.OFF) as stack:
        await asyncio.gather(
            stack.worker("verify", model=case.target, simulate_accept_length=case.mean_accept_length, **weights),
            stack.worker("draft", model=case.draft, algorithm=case.algorithm, target=case.target, **weights),
        )
        await run(stack, scenarios, partial(_sample, prompt), table)


async def _sample(prompt: list[int], served: Served, _: Scenario) -> AsyncIterator[Row]:
    async with AsyncClient(served.address) as client:
        await _generate(client, prompt)
        runs = [await _generate(client, prompt) for _ in range(REPEATS)]
    rates, accept_lengths = zip(*runs, strict=True)
    yield _row(rates, harmonic_mean(accept_lengths))


def _row(rates: Sequence[float], mean_accept_length: float) -> Row:
    """Sums up a way: without the first token, which belongs to the prompt; tokens of a target's forward."""
    return {"tokens_per_second": median(rates), "repeats": rates, "mean_accept_length": mean_accept_length}


async def _generate(client: AsyncClient, prompt: Sequence[int]) -> tuple[float, float]:
    """Returns tokens per second after the first message, and the accept length."""
    started, num_first, num_tokens, accept_length = 0.0, 0, 0, 1.0
    async for chunk in client.generate(prompt, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True):
        if not num_tokens:
            started, num_first = time.perf_counter(), len(chunk.token_ids)
        num_tokens += len(chunk.token_ids)
        if chunk.usage is not None:
            accept_length = chunk.usage.mean_accept_length
    return (num_tokens - num_first) / (time.perf_counter() - started), accept_length


def load(directory: Path, device: str, dtype: torch.dtype, *, is_dummy: bool) -> Any:
    """Loads a causal model, or makes one with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    if not is_dummy:
        return auto.from_pretrained(directory, dtype=dtype).to(device).eval()
    with torch.device(device):
        return auto.from_config(AutoConfig.from_pretrained(directory), dtype=dtype).eval()


def draw_script(num_positions: int, rate: float, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the target's token at each position, and the assistant's guess, right with probability `rate`.

    Random weights never agree, and two systems are compared fairly only if their drafts are accepted alike. So both
    models compute, and then the logits that the next tokens are taken from are replaced by those of a script.
    """
    tokens = FIRST_TOKEN + torch.arange(num_positions) % NUM_TOKENS
    is_right = torch.rand(num_positions, generator=torch.Generator().manual_seed(seed)) < rate
    return tokens, torch.where(is_right, tokens, WRONG_TOKEN)


def follow(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """Replaces the logits of a causal model so that its token at position p is `tokens[p]`; returns the undo."""
    tokens = tokens.to(model.device)

    def force(_model: Any, _args: Any, arguments: dict[str, Any], output: Any) -> None:
        num_seen, width = arguments["attention_mask"].shape[1], output.logits.shape[1]
        # The logits of a row's last input are for the position after all that was seen.
        said = tokens[num_seen - width + 1 : num_seen + 1]
        output.logits.fill_(0.0)
        output.logits.scatter_(2, said[None, :, None], 100.0)

    removed: Callable[[], None] = model.register_forward_hook(force, with_kwargs=True).remove
    return removed


class TransformersPeer:
    """Greedy generation of a fixed length, one request at a time."""

    def __init__(self, target: Any, prompt: Sequence[int], num_new_tokens: int) -> None:
        self._target = target
        self._prompt = torch.tensor([[*prompt]], device=target.device)
        self._num_new_tokens = num_new_tokens
        self._num_forwards = 0

    @property
    def _longest(self) -> int:
        return self._prompt.shape[1] + self._num_new_tokens

    def compiled(self) -> Row:
        """Decodes plainly with a static cache, which `transformers` compiles by itself on a GPU.

        One cache for all runs: with one for each, graphs would be recorded again where it lies elsewhere.
        """
        from transformers import StaticCache

        cache = StaticCache(config=self._target.config, max_cache_len=self._longest)
        # The second run uses what the first one compiled. Forwards are not counted: a hook would have the model
        # compiled again, and each forward is a token.
        rates, _ = self._measure((self._num_new_tokens,) * 2, past_key_values=cache)
        return {"way": COMPILED, **_row(rates, 1.0)}

    def assisted(self, assistant: Any, *, num_draft_tokens: int, mean_accept_length: float | None) -> Row:
        """Generates with an assistant; with `mean_accept_length` both models follow a script that agrees as often."""
        assistant.generation_config.update(
            num_assistant_tokens=num_draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        with ExitStack() as held:
            held.callback(self._target.register_forward_hook(self._count).remove)
            if mean_accept_length is not None:
                rate = acceptance_rate(mean_accept_length, num_draft_tokens)
                script = draw_script(self._longest + num_draft_tokens + 2, rate, seed=0)
                for model, tokens in zip((self._target, assistant), script, strict=True):
                    held.callback(follow(model, tokens))
            warm_up = min(WARM_UP_TOKENS, self._num_new_tokens)
            rates, num_forwards = self._measure((warm_up,), assistant_model=assistant)
        return {"way": ASSISTED, **_row(rates, REPEATS * (self._num_new_tokens - 1) / num_forwards)}

    def _measure(self, warm_up: Sequence[int], **settings: Any) -> tuple[list[float], int]:
        """Returns rates after the first token, and forwards. `warm_up`: tokens of each run before those that count."""
        rates, num_forwards = [], 0
        for num_new_tokens in warm_up:
            self._run(num_new_tokens, settings)
        for _ in range(REPEATS):
            first, num_first = self._run(1, settings)
            whole, num_whole = self._run(self._num_new_tokens, settings)
            rates.append((self._num_new_tokens - 1) / (whole - first))
            num_forwards += num_whole - num_first
        return rates, num_forwards

    def _run(self, num_new_tokens: int, settings: dict[str, Any]) -> tuple[float, int]:
        """Returns seconds, and forwards of the target."""
        self._num_forwards = 0
        if "past_key_values" in settings:
            settings["past_key_values"].reset()
        lengths = {"max_new_tokens": num_new_tokens, "min_new_tokens": num_new_tokens}
        mask = torch.ones_like(self._prompt)
        self._synchronize()
        started = time.perf_counter()
        output = self._target.generate(
            self._prompt, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths, **settings
        )
        self._synchronize()
        seconds = time.perf_counter() - started
        assert output.shape[1] == self._prompt.shape[1] + num_new_tokens, "the length is fixed"
        return seconds, self._num_forwards

    def _count(self, *_: object) -> None:
        self._num_forwards += 1

    def _synchronize(self) -> None:
        if self._prompt.is_cuda:
            torch.cuda.synchronize(self._prompt.device)


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> None:
    """Measures both systems, one after the other."""
    # Imported where they are used, as it takes seconds, and `figures.py` reads the names of the ways only.
    from transformers.utils import logging as transformers_logging

    table = Table(file, "case", "way", order=itemgetter("case"))
    # Without progress bars and warnings, such as of arguments that assisted generation itself passes on.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with TemporaryDirectory() as folder:
        for name in plan.case:
            await measure(Case.named(name, Path(folder)), plan.device, table)
