"""Distil multi-token prediction modules from the target, on the corpus and on the target's own samples."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import load_file

from slipstream.training import checkpoint, options
from slipstream.training.distillation import load_sources, train
from slipstream.training.divergence import head_loss
from slipstream.training.mtp import MtpHead
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import Record, write_log

NUM_MODULES = 3
SHARED_PART = 0.4
"""Part of the time in which one module serves all draft tokens, and learns from all of them."""
FIT_TOKENS = 2**15


def load(head: MtpHead, folder: Path) -> None:
    """Give each draft token its own module, with the weights that ``save`` wrote."""
    head.separate()
    weights = load_file(folder / "model.safetensors")
    for number, module in enumerate(head.steps, start=head.shape.num_hidden_layers):
        module.load_state_dict({name: weights[f"model.layers.{number}.{name}"] for name in module.state_dict()})


def save(head: MtpHead, folder: Path) -> None:
    """Write the modules under DeepSeek's names, as bfloat16, without the target's embedding and output."""
    numbered = enumerate(head.steps, start=head.shape.num_hidden_layers)
    parts = (checkpoint.rounded(module, f"model.layers.{number}.") for number, module in numbered)
    weights = dict(chain.from_iterable(part.items() for part in parts))
    num_modules = len(head.steps)
    checkpoint.save_head(weights, head.shape, folder, num_nextn_predict_layers=num_modules, tie_word_embeddings=True)


def main(
    corpus: options.Corpus,
    samples: options.Samples,
    target: options.Target,
    out: options.Out,
    log: options.Log,
    steps: options.Steps = 8000,
    minutes: options.Minutes = 10.0,
    batch: options.Batch = 12,
    length: options.Length = None,
    start: Annotated[Path | None, typer.Option(help="Folder of modules to train further.")] = None,
    overlap_weight: options.OverlapWeight = 1.0,
    rate: options.Rate = 2e-3,
    seed: options.Seed = 0,
    device: options.Device = "cuda",
) -> None:
    """Train the modules on the target's distributions and write them as bfloat16: one for all first, then each."""
    where = options.begin(seed, device)
    text, own = sources = load_sources(
        corpus, samples, where, batch=batch, seed=seed, samples_per_text=2, length=length
    )
    teacher = checkpoint.load_for_training(target).eval().requires_grad_(False).to(where)
    fitted_to = text.stream[: FIT_TOKENS // text.length * text.length].view(-1, text.length).long()
    head = MtpHead(teacher, NUM_MODULES, fitted_to).to(where)
    parts: tuple[float, ...] = (SHARED_PART, 1.0 - SHARED_PART)
    if start is not None:
        load(head, start)
        parts = (1.0,)
    records: list[Record] = []
    for part in parts:
        config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate / 4, weight_decay=0.01)
        course = Course(steps=round(steps * part), minutes=minutes * part)
        records += train(head, head_loss(head, teacher, overlap_weight), sources, course, config)
        save(head, out)
        head.separate()
    settings = {"steps": steps, "batch": batch, "length": text.length, "overlap_weight": overlap_weight, "seed": seed}
    settings |= {"modules": NUM_MODULES, "rate": rate, "parameters": checkpoint.num_parameters(head)}
    write_log(log, settings | {"sample_rows": len(own.rows)}, records)


if __name__ == "__main__":
    options.run(main)
