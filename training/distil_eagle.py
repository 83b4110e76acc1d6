"""Distil the EAGLE head from the target, on the corpus and on the target's own samples."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from slipstream.training import checkpoint, options
from slipstream.training.distil_mtp import FIT_TOKENS
from slipstream.training.distillation import load_sources, train
from slipstream.training.divergence import head_loss
from slipstream.training.eagle import EagleHead
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import write_log


def save(head: EagleHead, folder: Path) -> None:
    """Write the head in the layout of the paper's authors, rounded to bfloat16, without what is the target's."""
    config = {"bias": True, "num_hidden_layers": 1, "tie_word_embeddings": False}
    checkpoint.save_head(checkpoint.rounded(head), head.shape, folder, **config)


def main(
    corpus: options.Corpus,
    samples: options.Samples,
    target: options.Target,
    out: options.Out,
    log: options.Log,
    steps: options.Steps = 8000,
    minutes: options.Minutes = 10.0,
    batch: options.Batch = 12,
    length: Annotated[
        int, typer.Option(min=2, help="Tokens of a sequence of corpus at most.")
    ] = checkpoint.CONTEXT_TOKENS,
    depth: Annotated[int, typer.Option(min=1, help="Tokens of a chain.")] = 4,
    overlap_weight: options.OverlapWeight = 1.0,
    rate: options.Rate = 2e-3,
    seed: options.Seed = 0,
    device: options.Device = "cuda",
) -> None:
    """Train the EAGLE head on the target's distributions and write it as bfloat16."""
    where = options.begin(seed, device)
    text, own = load_sources(corpus, samples, where, batch=batch, seed=seed, samples_per_text=2)
    teacher = checkpoint.load_for_training(target).eval().requires_grad_(False).to(where)
    fitted_to = text.stream[: FIT_TOKENS // text.length * text.length].view(-1, text.length).long()
    head = EagleHead(teacher, fitted_to)
    compare = head_loss(partial(head, depth=depth), teacher, overlap_weight)
    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate / 4, weight_decay=0.01)
    course, longest = Course(steps=steps, minutes=minutes), min(length, checkpoint.CONTEXT_TOKENS)
    records = train(head, compare, (text, own), course, config, length=longest)
    save(head, out)
    settings = {"steps": steps, "batch": batch, "length": length, "overlap_weight": overlap_weight, "seed": seed}
    settings |= {"depth": depth, "rate": rate, "parameters": checkpoint.num_parameters(head)}
    write_log(log, settings | {"sample_rows": len(own.rows)}, records)


if __name__ == "__main__":
    options.run(main)
