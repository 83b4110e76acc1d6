"""One request at a time: this system, and `transformers` on the same weights' shape, prompt and machine.

    python benchmarks/peers.py --device cuda --json benchmarks/results/peers_h200.json

Two pairs of models. The bundled ones, with their real weights: whoever drafts better is faster. And the shape of
Llama 3.1 8B with random weights, where acceptance is drawn by chance with the same mean on both sides; `transformers`
is assisted by the shape of Llama 3.2 1B, this system by an EAGLE-3 head. Both count from the first token to the last.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from transformers import AutoTokenizer

from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.model_shapes import write_shape
from slipstream.benchmarks.serving_stack import free_ports
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.transformers_peer import REPEATS, Peer, TransformersPeer, load
from slipstream.bundled import prompts, standalone_dir, target_dir
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_DRAFT_TOKENS = 4
MEAN_ACCEPT_LENGTH = 3.5
NUM_NEW_TOKENS = 256
PROMPT_TOKENS = 128
LOG_DIR = Path("build/benchmarks")
CASES = ("bundled", "llama-3.1-8b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A target, a draft for this system, and an assistant for `transformers`."""

    name: str
    target: Path
    draft: Path
    algorithm: str
    assistant: Path
    mean_accept_length: float | None
    """Drawn by chance, with random weights; None is what real weights give."""

    @property
    def is_dummy(self) -> bool:
        """Whether the weights are random."""
        return self.mean_accept_length is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One way of generating, in one case."""

    case: str
    way: str
    device: str
    dtype: str
    prompt_tokens: int
    num_new_tokens: int
    num_draft_tokens: int
    tokens_per_second: float
    """Median over the repeats."""
    repeats: tuple[float, ...]
    mean_accept_length: float
    host: str
    hardware: str


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; all unless given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the results.")] = None,
) -> None:
    """Measures both, one after the other."""
    results: list[Result] = []
    with TemporaryDirectory() as folder:
        for name in case or CASES:
            results += _measure(_case(name, Path(folder)), device)
            if json_file is not None:
                json_file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    for result in results:
        ours = next(other for other in results if other.case == result.case and other.way == "slipstream, drafting")
        print(
            f"{result.case}: {result.way}: {result.tokens_per_second:.0f} tokens/s, accept length "
            f"{result.mean_accept_length:.2f}; slipstream with drafting is "
            f"{ours.tokens_per_second / result.tokens_per_second:.2f} times as fast"
        )


def _case(name: str, folder: Path) -> Case:
    if name == "bundled":
        return Case(
            name=name,
            target=target_dir(),
            draft=standalone_dir(),
            algorithm="standalone",
            assistant=standalone_dir(),
            mean_accept_length=None,
        )
    if name not in CASES:
        raise typer.BadParameter(f"one of {', '.join(CASES)}", param_hint="--case")
    return Case(
        name=name,
        target=write_shape(folder, name),
        draft=write_shape(folder, f"eagle3-{name}"),
        algorithm="eagle3",
        assistant=write_shape(folder, "llama-3.2-1b"),
        mean_accept_length=MEAN_ACCEPT_LENGTH,
    )


def _measure(case: Case, device: str) -> list[Result]:
    tokenizer = AutoTokenizer.from_pretrained(case.target)
    prompt = tokenizer.encode(prompts()[0].text)
    prompt = (prompt * -(-PROMPT_TOKENS // len(prompt)))[:PROMPT_TOKENS]
    peers = asyncio.run(_slipstream(case, device, prompt))
    peers += _transformers(case, torch.device(device), prompt)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    return [
        Result(
            case=case.name,
            way=peer.way,
            device=device,
            dtype=str(_dtype(device)).removeprefix("torch."),
            prompt_tokens=len(prompt),
            num_new_tokens=NUM_NEW_TOKENS,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            tokens_per_second=peer.tokens_per_second,
            repeats=peer.repeats,
            mean_accept_length=peer.mean_accept_length,
            host=host(),
            hardware=gpu,
        )
        for peer in peers
    ]


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _transformers(case: Case, device: torch.device, prompt: Sequence[int]) -> list[Peer]:
    models = [
        load(directory, device=device, dtype=_dtype(device.type), is_dummy=case.is_dummy)
        for directory in (case.target, case.assistant)
    ]
    peer = TransformersPeer(models[0], num_new_tokens=NUM_NEW_TOKENS)
    return [
        peer.assisted(prompt, models[1], num_draft_tokens=NUM_DRAFT_TOKENS, mean_accept_length=case.mean_accept_length),
        peer.compiled(prompt),
    ]


async def _slipstream(case: Case, device: str, prompt: Sequence[int]) -> list[Peer]:
    weights = ("--device", device, *(("--load-format", "dummy") if case.is_dummy else ()))
    simulated = () if case.mean_accept_length is None else ("--simulate-accept-length", str(case.mean_accept_length))
    head = ("--algorithm", case.algorithm, "--target", str(case.target))
    async with Stack(LOG_DIR) as stack:
        await asyncio.gather(
            stack.worker("verify", "--model", str(case.target), *weights, *simulated),
            stack.worker("draft", "--model", str(case.draft), *head, *weights),
        )
        draft = ("--draft", stack.socket("draft"), "--num-draft-tokens", str(NUM_DRAFT_TOKENS))
        return [
            await _serve(stack, way, prompt, arguments)
            for way, arguments in (("slipstream, drafting", draft), ("slipstream, plain", ()))
        ]


async def _serve(stack: Stack, way: str, prompt: Sequence[int], arguments: tuple[str, ...]) -> Peer:
    (port,) = free_ports(1)
    sizes = ("--slots", "1", "--context-tokens", str(2 * (PROMPT_TOKENS + NUM_NEW_TOKENS)))
    async with (
        stack.scheduler("--verify", stack.socket("verify"), *sizes, *arguments, port=port, metrics_port=0) as address,
        AsyncClient(address) as client,
    ):
        await _generate(client, prompt)
        runs = [await _generate(client, prompt) for _ in range(REPEATS)]
    rates = tuple(rate for rate, _ in runs)
    return Peer(way=way, tokens_per_second=median(rates), repeats=rates, mean_accept_length=runs[-1][1])


async def _generate(client: AsyncClient, prompt: Sequence[int]) -> tuple[float, float]:
    """Tokens per second behind the first message, and the accept length."""
    started, num_first, num_tokens, accept_length = 0.0, 0, 0, 1.0
    async for chunk in client.generate(prompt, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True):
        if not num_tokens:
            started, num_first = time.perf_counter(), len(chunk.token_ids)
        num_tokens += len(chunk.token_ids)
        if chunk.usage is not None:
            accept_length = chunk.usage.mean_accept_length
    return (num_tokens - num_first) / (time.perf_counter() - started), accept_length


if __name__ == "__main__":
    typer.run(main)
