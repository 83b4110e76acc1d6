"""Distil the standalone draft from the target, on the corpus and on the target's own samples."""

from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from slipstream.training import checkpoint, options
from slipstream.training.distillation import load_sources, train
from slipstream.training.divergence import divergence, log_distribution
from slipstream.training.llama import Llama
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import write_log


def divergence_of_logits(student: Tensor, teacher: Tensor, overlap_weight: float) -> tuple[Tensor, Tensor]:
    """See ``divergence``; of logits [batch, length, vocabulary]."""
    log_p, log_q = log_distribution(teacher), log_distribution(student)
    return divergence(log_q, log_p, overlap_weight)


def main(
    corpus: options.Corpus,
    samples: options.Samples,
    target: options.Target,
    out: options.Out,
    log: options.Log,
    steps: options.Steps = 4000,
    minutes: options.Minutes = 10.0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of corpus a step; of samples, as many tokens.")] = 24,
    overlap_weight: options.OverlapWeight = 1.0,
    rate: options.Rate = 4e-3,
    seed: options.Seed = 0,
    device: options.Device = "cuda",
) -> None:
    """Train the standalone draft on the target's distributions and write it as bfloat16."""
    where = options.begin(seed, device)
    sources = load_sources(corpus, samples, where, batch=batch, seed=seed)
    teacher = checkpoint.load_for_training(target).to(where).eval().requires_grad_(False)
    student = Llama(checkpoint.STANDALONE).to(where)
    compiled: Any = partial(torch.compile, dynamic=False) if where.type == "cuda" else lambda work: work
    read_teacher, read_student, compare_logits = map(compiled, (teacher, student, divergence_of_logits))

    def compare(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(where.type, dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = read_teacher(tokens)
            found = read_student(tokens)
        loss, overlap = compare_logits(found, wanted, overlap_weight)
        return loss, overlap

    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate, weight_decay=0.01)
    records = train(student, compare, sources, Course(steps=steps, minutes=minutes), config)
    checkpoint.save(student, out, target)
    settings = {"steps": steps, "batch": batch, "length": sources[0].length, "overlap_weight": overlap_weight}
    settings |= {"seed": seed, "rate": rate, "parameters": checkpoint.num_parameters(student)}
    write_log(log, settings | {"sample_rows": len(sources[1].rows)}, records)


if __name__ == "__main__":
    options.run(main)
