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
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import harmonic_mean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from slipstream.benchmarks.model_shapes import write_shape
from slipstream.benchmarks.models import ACCEPT_LENGTH, EAGLE3, NUM_DRAFT_TOKENS, STANDALONE, DeviceOption
from slipstream.benchmarks.result_files import host, read_rows, write_rows
from slipstream.benchmarks.stack import Stack
from slipstream.benchmarks.transformers_peer import ASSISTED, REPEATS, Peer, TransformersPeer, load, quiet
from slipstream.bundled import prompts, standalone_dir, target_dir
from slipstream.cli.up.mps import MpsMode
from slipstream.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_NEW_TOKENS = 256
PROMPT_TOKENS = 128
BUNDLED, SHAPE_8B = CASES = ("bundled", "llama-3.1-8b")
DRAFTING, PLAIN = "slipstream, drafting", "slipstream, plain"
DRAFTS = {
    (BUNDLED, DRAFTING): "bundled standalone draft",
    (BUNDLED, ASSISTED): "bundled standalone draft",
    (SHAPE_8B, DRAFTING): "shape of an EAGLE-3 head, accepted by chance",
    (SHAPE_8B, ASSISTED): "shape of Llama 3.2 1B, accepted by chance",
}
"""The draft by case and way; the other ways have none. The target of a case is the same in all of its ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Peer):
    """One way of generating, in one case."""

    case: str
    device: str
    dtype: str
    prompt_tokens: int
    num_new_tokens: int
    num_draft_tokens: int
    host: str
    hardware: str


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


class Measurement:
    """All ways of generating, in one case."""

    def __init__(self, case: Case, device: str, keep: Callable[[Result], None]) -> None:
        """`keep` gets each way as it is measured."""
        self._case = case
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._is_dummy = case.mean_accept_length is not None
        self._keep_result = keep
        self._host = host()
        self._hardware = host(device).partition(",")[0] if device == "cuda" else "no GPU"
        tokenizer = AutoTokenizer.from_pretrained(case.target)
        prompt = tokenizer.encode(prompts()[0].text)
        self._prompt = (prompt * -(-PROMPT_TOKENS // len(prompt)))[:PROMPT_TOKENS]

    def run(self) -> None:
        """Measures one way after the other; only ways with the same models are in memory together."""
        asyncio.run(self._slipstream())
        self._transformers()

    async def _slipstream(self) -> None:
        case = self._case
        weights: dict[str, Any] = {"load_format": "dummy" if self._is_dummy else "auto"}
        async with Stack(device=self._device.type, mps=MpsMode.OFF) as stack:
            await asyncio.gather(
                stack.worker("verify", model=case.target, simulate_accept_length=case.mean_accept_length, **weights),
                stack.worker("draft", model=case.draft, algorithm=case.algorithm, target=case.target, **weights),
            )
            self._keep(await self._serve(stack, DRAFTING, "draft"))
            self._keep(await self._serve(stack, PLAIN, None))

    async def _serve(self, stack: Stack, way: str, draft: str | None) -> Peer:
        scheduler = stack.scheduler(
            draft,
            slots=1,
            context_tokens=2 * (PROMPT_TOKENS + NUM_NEW_TOKENS),
            num_draft_tokens=NUM_DRAFT_TOKENS if draft else None,
        )
        async with scheduler as served, AsyncClient(served.address) as client:
            await _generate(client, self._prompt)
            runs = [await _generate(client, self._prompt) for _ in range(REPEATS)]
        rates, accept_lengths = zip(*runs, strict=True)
        return Peer(
            way=way, tokens_per_second=median(rates), repeats=rates, mean_accept_length=harmonic_mean(accept_lengths)
        )

    def _transformers(self) -> None:
        target, assistant = (
            load(directory, device=self._device, dtype=self._dtype, is_dummy=self._is_dummy)
            for directory in (self._case.target, self._case.assistant)
        )
        peer, mean = TransformersPeer(target, num_new_tokens=NUM_NEW_TOKENS), self._case.mean_accept_length
        self._keep(peer.assisted(self._prompt, assistant, num_draft_tokens=NUM_DRAFT_TOKENS, mean_accept_length=mean))
        self._keep(peer.compiled(self._prompt))

    def _keep(self, peer: Peer) -> None:
        result = Result(
            case=self._case.name,
            device=self._device.type,
            dtype=str(self._dtype).removeprefix("torch."),
            prompt_tokens=len(self._prompt),
            num_new_tokens=NUM_NEW_TOKENS,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            host=self._host,
            hardware=self._hardware,
            **asdict(peer),
        )
        print(f"{result.case}, {result.way}: {result.tokens_per_second:.0f} tokens/s", flush=True)
        self._keep_result(result)


def main(
    device: DeviceOption = "cpu",
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; all unless given.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="The file for the results; other cases in it are kept.")
    ] = None,
) -> None:
    """Measures both systems, one after the other."""
    names = tuple(dict.fromkeys(case or CASES))
    if not set(names) <= set(CASES):
        raise typer.BadParameter(f"one of {', '.join(CASES)}", param_hint="--case")
    try:
        results = [result for result in read_rows(json_file, Result) if result.case not in names]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--json") from error

    def keep(result: Result) -> None:
        results.append(result)
        results.sort(key=attrgetter("case"))
        write_rows(results, json_file)

    quiet()
    with TemporaryDirectory() as folder:
        for name in names:
            Measurement(_case(name, Path(folder)), device, keep).run()


def _case(name: str, folder: Path) -> Case:
    if name == BUNDLED:
        return Case(
            name=name,
            target=target_dir(),
            draft=standalone_dir(),
            algorithm=STANDALONE,
            assistant=standalone_dir(),
            mean_accept_length=None,
        )
    return Case(
        name=name,
        target=write_shape(folder, name),
        draft=write_shape(folder, f"eagle3-{name}"),
        algorithm=EAGLE3,
        assistant=write_shape(folder, "llama-3.2-1b"),
        mean_accept_length=ACCEPT_LENGTH,
    )


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
