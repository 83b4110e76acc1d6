"""A decoder with a paged cache, driven by plain lists: rows of tokens at positions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.checkpoint import load_decoder
from slipstream.services.models.decoder import Decoder, DecoderOutput
from slipstream.services.models.paged_kv import PagedKV

CPU = torch.device("cpu")
PAGE_SIZE = 4
PAGES_PER_ROW = 24
CAPACITY_TOKENS = PAGE_SIZE * PAGES_PER_ROW


class PagedModel:
    """Each row has its own pages, in an order shuffled by `seed`."""

    def __init__(self, model: Path | Decoder, *, num_rows: int = 4, seed: int = 0) -> None:
        """`model`: a checkpoint, which computes in float32, or the decoder itself."""
        print(f"page order from seed {seed}")
        self.decoder = model if isinstance(model, Decoder) else load_decoder(model, device=CPU, dtype=torch.float32)
        num_pages = 1 + num_rows * PAGES_PER_ROW
        config, dtype = self.decoder.config, self.decoder.embedding.dtype
        self.cache = PagedKV(config, num_pages=num_pages, page_size=PAGE_SIZE, device=CPU, dtype=dtype)
        pages = list(range(1, num_pages))
        random.Random(seed).shuffle(pages)
        self.page_table = torch.tensor(pages).view(num_rows, PAGES_PER_ROW)

    def batch(self, rows: Sequence[tuple[int, Sequence[int]]], *, first_row: int = 0, **changes: Any) -> ForwardBatch:
        """One batch row for each (start, tokens); shorter ones are padded with invalid queries."""
        width = max(len(tokens) for _, tokens in rows)
        shape = (len(rows), width)
        padded = torch.zeros(shape, dtype=torch.int64)
        is_valid = torch.zeros(shape, dtype=torch.bool)
        for index, (_, tokens) in enumerate(rows):
            padded[index, : len(tokens)] = torch.tensor(tokens)
            is_valid[index, : len(tokens)] = True
        starts = torch.tensor([start for start, _ in rows])
        batch = ForwardBatch(
            tokens=padded,
            positions=starts[:, None] + torch.arange(width),
            is_valid=is_valid,
            page_table=self.page_table[first_row : first_row + len(rows)],
            limits=torch.full((len(rows),), CAPACITY_TOKENS),
        )
        return replace(batch, **changes)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [B, W, V]."""
        return self.decoder.logits(self.output(batch).hidden)

    def output(self, batch: ForwardBatch, *, aux_layers: tuple[int, ...] = ()) -> DecoderOutput:
        """The decoder's own output."""
        output: DecoderOutput = self.decoder(batch, self.cache, aux_layers=aux_layers)
        return output

    def prefill(self, prompt: Sequence[int], *, chunk: int, row: int = 0) -> torch.Tensor:
        """Logits [len(prompt), V] of a prompt that is fed in chunks."""
        starts = range(0, len(prompt), chunk)
        parts = [self.run(self.batch([(start, prompt[start : start + chunk])], first_row=row)) for start in starts]
        return torch.cat(parts, dim=1)[0]

    def greedy(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = CAPACITY_TOKENS
    ) -> list[list[int]]:
        """Prefills all prompts, in one batch where they fit into a chunk, then decodes them together."""
        if max(map(len, prompts)) <= chunk:
            logits = list(self.run(self.batch([(0, prompt) for prompt in prompts])))
        else:
            logits = [self.prefill(prompt, chunk=chunk, row=row) for row, prompt in enumerate(prompts)]
        outputs = [[int(logits[row][len(prompt) - 1].argmax())] for row, prompt in enumerate(prompts)]
        while len(outputs[0]) < num_tokens:
            starts = [len(prompt) + len(output) - 1 for prompt, output in zip(prompts, outputs, strict=True)]
            bound = max(starts) + 1
            steps = [(start, output[-1:]) for start, output in zip(starts, outputs, strict=True)]
            step_logits = self.run(self.batch(steps, max_kv_len=bound))
            for output, row in zip(outputs, step_logits, strict=True):
                output.append(int(row[0].argmax()))
        return outputs


def random_tokens(num_tokens: int, *, seed: int, vocab_size: int = 272) -> list[int]:
    """Token ids from a seed that is printed."""
    print(f"{num_tokens} tokens from seed {seed}")
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]
