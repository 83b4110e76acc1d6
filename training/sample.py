"""Samples text from the target, on which its draft is trained."""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from slipstream.training import checkpoint, options
from slipstream.training.texts import smallest_dtype
from slipstream.training.windows import load_tokens


@torch.inference_mode()
def continue_text(
    model: LlamaForCausalLM, prefixes: Tensor, *, length: int, temperature: float, random: torch.Generator
) -> Tensor:
    """Sample until each row has ``length`` tokens.

    ``prefixes``: int64 [rows, tokens]. Returns int64 [rows, length], the prefixes included. The text goes on
    after an end-of-text token, as the training stream does.
    """
    cache = DynamicCache()
    rows = [prefixes]
    tokens = prefixes
    for _ in range(length - prefixes.shape[1]):
        logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        waiting = torch.empty_like(logits).exponential_(generator=random)
        tokens = ((logits / temperature).softmax(-1) / waiting).argmax(-1, keepdim=True)
        rows.append(tokens)
    return torch.cat(rows, dim=1)


def main(
    corpus: Annotated[Path, typer.Option(help="Folder with train.npy, where the prefixes come from.")],
    target: options.Target,
    out: Annotated[Path, typer.Option(help="The sampled rows, [rows, length], .npy.")],
    num_tokens: Annotated[int, typer.Option(help="Tokens to sample, prefixes not counted.")] = 3_000_000,
    minutes: Annotated[float, typer.Option(help="Start no further batch after this time.")] = 2.0,
    batch: Annotated[int, typer.Option(help="Rows sampled at once.")] = 4096,
    length: Annotated[int, typer.Option(help="Tokens a row, the prefix included.")] = 320,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.8,
    seed: options.Seed = 0,
    device: options.Device = "cuda",
) -> None:
    """Continue random pieces of training text with the target; prefixes have 48 to 96 tokens."""
    began = time.monotonic()
    where = options.begin(seed, device)
    model = checkpoint.load(target, where, torch.bfloat16)
    stream = load_tokens(corpus / "train.npy", where)
    random = torch.Generator(where).manual_seed(seed)
    done: list[Tensor] = []
    sampled = 0
    while sampled < num_tokens and time.monotonic() - began < 60 * minutes:
        prefix = int(torch.randint(48, 97, (1,), generator=random, device=where))
        starts = torch.randint(len(stream) - prefix, (batch, 1), generator=random, device=where)
        prefixes = stream[starts + torch.arange(prefix, device=where)].long()
        rows = continue_text(model, prefixes, length=length, temperature=temperature, random=random)
        done.append(rows.to(torch.int32).cpu())
        sampled += batch * (length - prefix)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.save(out, torch.cat(done).numpy().astype(smallest_dtype(model.config.vocab_size)))
    typer.echo(f"{sampled} tokens sampled in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    options.run(main)
