"""Bits per byte of held-out text, in sliding windows over each file."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Tokens to run, and how many of the last ones to score."""

    tokens: list[int]
    scored: int


def windows(tokens: list[int], context: int, stride: int) -> Iterator[Window]:
    """Cut one file, whose first token is end-of-text, so that each later token is scored once.

    A token is scored with at least ``context - stride`` tokens before it, or all the file has.
    """
    end = 1
    while end < len(tokens):
        new_end = min(len(tokens), context + 1) if end == 1 else min(len(tokens), end + stride)
        yield Window(tokens=tokens[max(0, new_end - context - 1) : new_end], scored=new_end - end)
        end = new_end


@torch.inference_mode()
def nats(model: LlamaForCausalLM, batch: list[Window]) -> float:
    """Summed negative log-likelihood of the scored tokens."""
    longest = max(len(window.tokens) for window in batch)
    rows = torch.zeros(len(batch), longest, dtype=torch.int64)
    scored = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
    for i, window in enumerate(batch):
        rows[i, : len(window.tokens)] = torch.tensor(window.tokens)
        scored[i, len(window.tokens) - 1 - window.scored : len(window.tokens) - 1] = True
    rows, scored = rows.to(model.device), scored.to(model.device)
    logits: Tensor = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits[scored].float(), rows[:, 1:][scored], reduction="sum").item()


def measure(
    model: LlamaForCausalLM, files: list[list[int]], num_bytes: int, *, context: int, stride: int, batch: int = 16
) -> dict[str, float]:
    """Bits per byte over ``files`` (token ids, end-of-text first) of ``num_bytes`` bytes of UTF-8 in all."""
    cut = sorted(
        (window for file in files for window in windows(file, context, stride)), key=lambda window: len(window.tokens)
    )
    total = sum(nats(model, cut[i : i + batch]) for i in range(0, len(cut), batch))
    num_tokens = sum(window.scored for window in cut)
    return {
        "bits_per_byte": total / math.log(2) / num_bytes,
        "nats_per_token": total / num_tokens,
        "files": len(files),
        "bytes": num_bytes,
        "tokens": num_tokens,
        "context": context,
        "stride": stride,
    }
