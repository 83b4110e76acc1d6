"""Measures what rounding keys and values costs: errors of logits, and tokens that are still the likeliest.

The bundled target computes in float32 on a CPU, and its pages hold numbers as they are, rounded to bfloat16, or as FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from slipstream.benchmarks.runner import Row, Table, benchmark, host
from slipstream.bundled import prompts, target_dir
from slipstream.common.settings import Settings, setting
from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.checkpoint import load_decoder
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.paged_kv import PagedKV

CPU = torch.device("cpu")
FLOAT32, BFLOAT16, FP8 = "float32", "bfloat16", "fp8"
KINDS = (BFLOAT16, FP8)
PAGE_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """The settings of a measurement."""

    prompts: int = setting(64, help="Held-out prompts.", low=1, high=64)
    max_new_tokens: int = setting(200, help="Greedy tokens of each.", low=1, high=400)


class _Bfloat16KV(PagedKV):
    """Rounds what it keeps, in pages of float32."""

    def keep(self, layer: int, places: torch.Tensor, values: torch.Tensor) -> None:
        super().keep(layer, places, values.to(torch.bfloat16).to(values.dtype))


class _Model:
    """The target, with pages of one kind."""

    def __init__(self, decoder: Decoder, kind: str, num_tokens: int) -> None:
        self._decoder, self._num_pages = decoder, -(-num_tokens // PAGE_SIZE)
        self._cache = (_Bfloat16KV if kind == BFLOAT16 else PagedKV)(
            decoder.config,
            num_pages=1 + self._num_pages,
            page_size=PAGE_SIZE,
            device=CPU,
            dtype=torch.float32,
            is_fp8=kind == FP8,
        )

    def logits(self, start: int, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocab_size], of tokens at the positions from `start` on."""
        given = torch.tensor([[*tokens]])
        batch = ForwardBatch(
            tokens=given,
            positions=start + torch.arange(len(tokens))[None],
            is_valid=torch.ones_like(given, dtype=torch.bool),
            page_table=torch.arange(1, 1 + self._num_pages)[None],
            limits=torch.tensor([self._num_pages * PAGE_SIZE]),
            max_kv_len=start + len(tokens),
        )
        return self._decoder.logits(self._decoder.forward(batch, self._cache).hidden)[0]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest tokens after a prompt, one after the other."""
        output = [int(self.logits(0, prompt)[-1].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.logits(len(prompt) + len(output) - 1, output[-1:])[-1].argmax()))
        return output


def compare(plan: Plan) -> list[Row]:
    """A row for each kind of numbers, beside float32."""
    decoder = load_decoder(target_dir(), device=CPU, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(target_dir() / "tokenizer.json"))
    texts = [tokenizer.encode(prompt.text).ids for prompt in prompts()[: plan.prompts]]
    models = {kind: _Model(decoder, kind, max(map(len, texts)) + plan.max_new_tokens) for kind in (FLOAT32, *KINDS)}
    outputs = {kind: [model.greedy(text, plan.max_new_tokens) for text in texts] for kind, model in models.items()}
    # Of the same text, so that one difference does not lead to others.
    errors: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    for text, output in zip(texts, outputs[FLOAT32], strict=True):
        first = len(text) - 1
        exact = models[FLOAT32].logits(0, text + output[:-1])[first:]
        for kind in KINDS:
            found = models[kind].logits(0, text + output[:-1])[first:]
            off = (found - exact).abs()
            is_same = (found.argmax(dim=1) == exact.argmax(dim=1)).float().mean()
            errors[kind].append((float(off.mean()), float(off.max()), float(is_same)))
    return [
        {
            "kind": kind,
            "host": host(),
            "num_prompts": len(texts),
            "max_new_tokens": plan.max_new_tokens,
            "kv_bytes_per_token": decoder.config.kv_bytes_per_token(torch.bfloat16, is_fp8=kind == FP8),
            "mean_logit_error": sum(error[0] for error in errors[kind]) / len(texts),
            "most_logit_error": max(error[1] for error in errors[kind]),
            "share_of_equal_tokens": sum(error[2] for error in errors[kind]) / len(texts),
            "share_of_equal_outputs": sum(
                one == other for one, other in zip(outputs[kind], outputs[FLOAT32], strict=True)
            )
            / len(texts),
        }
        for kind in KINDS
    ]


@benchmark(Plan)
async def main(plan: Plan, path: Path | None) -> None:
    """Compares the logits and greedy tokens of the bundled target with rounded keys and values."""
    table = Table(path)
    for row in compare(plan):
        table.add(row)
