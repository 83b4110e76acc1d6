"""Trains the draft of a running server further on the server's own traffic, and swaps it in.

    slipstream up &
    python examples/adapt_draft.py --out /tmp/adapted

Asks for completions through the client, as the server's users would, and keeps prompts and outputs. On these it distils
the bundled standalone draft from the bundled target for a minute, on the CPU. Then `slipstream swap-draft` puts the new
draft in the place of the old one while requests run, compares the two, and takes the new one off again if it is worse.
Any output stays the target's own.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from tokenizers import Tokenizer

from slipstream.bundled import prompts, standalone_dir, target_dir
from slipstream.client import AsyncClient
from slipstream.training import checkpoint
from slipstream.training.distil import divergence_of_logits
from slipstream.training.optimizer import Course, Optimizer, OptimizerConfig
from slipstream.training.run import steps as training_steps
from slipstream.training.windows import Windows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import Tensor

    from slipstream.training.llama import Llama

CONCURRENCY = 16
TEMPERATURE = 0.8
LENGTH, BATCH = 128, 16
"""Tokens of a window, and windows of a training step."""


async def traffic(client: AsyncClient, num_prompts: int, max_new_tokens: int) -> list[int]:
    """Completes prompts, and returns the tokens of all, prompt and output, each behind an end of text."""
    tokenizer = Tokenizer.from_file(str(target_dir() / "tokenizer.json"))
    texts = [prompt.text for prompt in prompts()]
    room = asyncio.Semaphore(CONCURRENCY)

    async def ask(number: int) -> list[int]:
        prompt: list[int] = tokenizer.encode(texts[number % len(texts)]).ids
        async with room:
            chunks = client.generate(
                prompt, max_new_tokens=max_new_tokens, temperature=TEMPERATURE, seed=number, ignore_eos=True
            )
            return [checkpoint.END_OF_TEXT_ID, *prompt, *[token async for chunk in chunks for token in chunk.token_ids]]

    rows = await asyncio.gather(*map(ask, range(num_prompts)))
    return [token for row in rows for token in row]


@asynccontextmanager
async def requests_running(client: AsyncClient) -> AsyncIterator[None]:
    """Keeps requests running while the context lasts: two drafts are compared by them."""

    async def ask() -> None:
        while True:
            await traffic(client, 1, max_new_tokens=128)

    tasks = [asyncio.create_task(ask()) for _ in range(CONCURRENCY)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def train(student: Llama, tokens: list[int], course: Course, rate: float) -> list[float]:
    """Trains in place on these tokens; returns the overlap with the target's distribution in each step.

    The overlap, sum of min(p, q), is about the chance that a token of the draft is accepted.
    """
    if len(tokens) < 3 * LENGTH:
        raise SystemExit(f"{len(tokens)} tokens of traffic, of at least {3 * LENGTH}: set a larger --num-prompts")
    teacher = checkpoint.load_for_training(target_dir()).eval().requires_grad_(False)
    stream = torch.tensor(tokens, dtype=torch.int32)
    batches = Windows(stream, length=LENGTH, batch=min(BATCH, len(tokens) // LENGTH - 2), seed=0).batches()
    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate, weight_decay=0.0)

    def backward() -> Tensor:
        batch = next(batches)
        loss, overlap = divergence_of_logits(student(batch), teacher(batch), overlap_weight=1.0)
        torch.autograd.backward(loss)
        return overlap.detach()

    return [step.result.item() for step in training_steps(Optimizer(student, config), course, backward)]


def swap(draft: Path, state_dir: Path | None) -> int:
    """Runs `slipstream swap-draft`; returns its exit status, which is not 0 if the old draft drafts again."""
    place = () if state_dir is None else ("--state-dir", str(state_dir))
    command = ("swap-draft", "--draft", str(draft.resolve()), "--algorithm", "standalone", *place)
    return subprocess.run((sys.executable, "-m", "slipstream.cli.main", *command), check=False).returncode


async def adapt(server: str, out: Path, state_dir: Path | None, num_prompts: int, course: Course, rate: float) -> int:
    """Does all of it; returns the exit status of the swap."""
    async with AsyncClient(server) as client:
        begun = time.monotonic()
        tokens = await traffic(client, num_prompts, max_new_tokens=192)
        print(f"{len(tokens)} tokens of traffic in {time.monotonic() - begun:.0f} s", flush=True)
        student = checkpoint.load_for_training(standalone_dir())
        overlaps = await asyncio.to_thread(train, student, tokens, course, rate)
        checkpoint.save(student, out, target_dir())
        print(f"{len(overlaps)} steps: overlap {overlaps[0]:.3f} -> {overlaps[-1]:.3f}; {out}", flush=True)
        async with requests_running(client):
            return await asyncio.to_thread(swap, out, state_dir)


def main(
    out: Annotated[Path, typer.Option(help="Directory for the new draft.")],
    server: Annotated[str, typer.Option(help="Address of the gateway.")] = "127.0.0.1:50051",
    state_dir: Annotated[Path | None, typer.Option(help="Of `slipstream up`, if it was started with one.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Completions to train on.")] = 192,
    minutes: Annotated[float, typer.Option(help="Train for so long at most.")] = 1.0,
    num_steps: Annotated[int, typer.Option("--steps", help="And for so many steps.")] = 200,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
) -> None:
    """Collects traffic, trains, and swaps."""
    torch.manual_seed(0)
    course = Course(steps=num_steps, minutes=minutes)
    sys.exit(asyncio.run(adapt(server, out, state_dir, num_prompts, course, rate)))


if __name__ == "__main__":
    typer.run(main)
