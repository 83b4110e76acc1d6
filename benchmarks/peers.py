"""One request at a time: this system, and `transformers` with the same target, prompt and machine.

Two cases. The bundled models, with their weights: both sides run the same target and the same standalone draft. The
shape of Llama 3.1 8B with random weights, where acceptance is drawn by chance with the same mean on both sides: this
system drafts with the shape of an EAGLE-3 head, `transformers`, which has none, with the shape of Llama 3.2 1B as its
assistant. Both count from the first token to the last. Each way of generating is in the file as soon as it is
measured, and the file keeps the cases that a run with `--case` leaves out.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import harmonic_mean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, StaticCache
from transformers.utils import logging as transformers_logging

from slipstream.benchmarks.models import ACCEPT_LENGTH, BUNDLED, EAGLE3, NUM_DRAFT_TOKENS, STANDALONE, write_shape
from slipstream.benchmarks.runner import DevicePlan, Names, Row, Scenario, Table, benchmark, host, run
from slipstream.benchmarks.stack import Stack
from slipstream.bundled import prompts, standalone_dir, target_dir
from slipstream.cli.up.mps import MpsMode
from slipstream.client import AsyncClient
from slipstream.services.models.sampler import acceptance_rate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from slipstream.benchmarks.stack import Served

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A target, a draft for this system, and an assistant for `transformers`."""

    name: str
    target: Path
    draft: Path
    algorithm: str
    assistant: Path
    mean_accept_length: float | None
    """Drawn by chance, with random weights; None: what real weights give."""

    @classmethod
    def named(cls, name: str, folder: Path) -> Case:
        """Returns the case; shapes are written into the folder."""
        if name == BUNDLED:
            target, draft, assistant = target_dir(), standalone_dir(), standalone_dir()
        else:
            shapes = (name, f"eagle3-{name}", "llama-3.2-1b")
            target, draft, assistant = (write_shape(folder, shape) for shape in shapes)
        return cls(
            name=name,
            target=target,
            draft=draft,
            algorithm=STANDALONE if name == BUNDLED else EAGLE3,
            assistant=assistant,
            mean_accept_length=None if name == BUNDLED else ACCEPT_LENGTH,
        )


@benchmark(Plan)
async def main(plan: Plan, file: Path | None) -> list[str]:
    """Measures both systems, one after the other."""
    line = "{case}, {way}: {tokens_per_second:.0f} tokens/s".format_map
    table = Table(file, "case", "way", line=line, order=itemgetter("case"))
    # Without progress bars and warnings, such as of arguments that assisted generation itself passes on.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with TemporaryDirectory() as folder:
        for name in plan.case:
            await measure(Case.named(name, Path(folder)), plan.device, table)
    return []


async def measure(case: Case, device: str, table: Table) -> None:
    """Measures all ways, one after the other; only ways with the same models are in memory together."""
    tokenizer = AutoTokenizer.from_pretrained(case.target)
    prompt = tokenizer.encode(prompts()[0].text)
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
    is_dummy, mean = case.mean_accept_length is not None, case.mean_accept_length
    target, assistant = (
        load(directory, device=torch.device(device), dtype=dtype, is_dummy=is_dummy)
        for directory in (case.target, case.assistant)
    )
    peer = TransformersPeer(target, num_new_tokens=NUM_NEW_TOKENS)
    assisted = peer.assisted(prompt, assistant, num_draft_tokens=NUM_DRAFT_TOKENS, mean_accept_length=mean)
    table.add(about | assisted)
    table.add(about | peer.compiled(prompt))


async def _slipstream(case: Case, device: str, prompt: list[int], about: Row, table: Table) -> None:
    weights: dict[str, Any] = {"load_format": "auto" if case.mean_accept_length is None else "dummy"}
    sizes = {"slots": 1, "context_tokens": 2 * (PROMPT_TOKENS + NUM_NEW_TOKENS)}
    ways = ((DRAFTING, "draft", NUM_DRAFT_TOKENS), (PLAIN, None, None))
    scenarios = [
        Scenario(about=about | {"way": way}, draft=draft, options={**sizes, "num_draft_tokens": count})
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
    """The first token, which belongs to the prompt, is not counted; the accept length is tokens a target's forward."""
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
        # The logits of a row's last input are for the position after all that was seen.
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

    def compiled(self, prompt: Sequence[int]) -> Row:
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
    ) -> Row:
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
    ) -> Row:
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
        mean_accept_length = REPEATS * (self._num_new_tokens - 1) / num_forwards if is_counted else 1.0
        return {"way": way, **_row(rates, mean_accept_length)}

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


if __name__ == "__main__":
    main()
