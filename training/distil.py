"""Distil the standalone draft from the target, on the corpus and on the target's own samples."""

from typing import Annotated

import torch
import typer
from torch import Tensor

from slipstream.training import checkpoint, options
from slipstream.training.distillation import TEMPERATURE, load_sources, train
from slipstream.training.llama import Llama
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import write_log


def divergence(student: Tensor, teacher: Tensor, overlap_weight: float) -> tuple[Tensor, Tensor]:
    """Loss and mean overlap of the two distributions at the temperature the draft is used at.

    ``student``, ``teacher``: logits [batch, length, vocabulary]. The overlap, sum of min(p, q), is the chance
    that rejection sampling accepts a token; KL alone would spend the small student on the target's tail.
    """
    log_p = (teacher.float() / TEMPERATURE).log_softmax(-1)
    log_q = (student.float() / TEMPERATURE).log_softmax(-1)
    p = log_p.exp()
    overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
    kl = (p * (log_p - log_q)).sum(-1).mean()
    return kl + overlap_weight * (1.0 - overlap), overlap


class Distillation:
    """One student, one teacher, and the loss of a batch (compiled on a GPU)."""

    def __init__(self, student: Llama, teacher: Llama, overlap_weight: float, *, compiled: bool) -> None:
        self.overlap_weight = overlap_weight
        self._teacher = torch.compile(teacher, dynamic=False) if compiled else teacher
        self._student = torch.compile(student, dynamic=False) if compiled else student
        self._divergence = torch.compile(divergence, dynamic=False) if compiled else divergence

    def loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and overlap, scalars, over ``tokens`` int64 [batch, length]."""
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            with torch.no_grad():
                teacher = self._teacher(tokens)
            student = self._student(tokens)
        loss, overlap = self._divergence(student, teacher, self.overlap_weight)
        return loss, overlap


def main(
    corpus: options.Corpus,
    samples: options.Samples,
    target: options.Target,
    out: options.Out,
    log: options.Log,
    steps: options.Steps = 4000,
    minutes: options.Minutes = 10.0,
    batch: Annotated[int, typer.Option(help="Sequences of corpus a step; of samples, as many tokens.")] = 24,
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
    typer.echo(f"{checkpoint.num_parameters(student)} parameters")
    distillation = Distillation(student, teacher, overlap_weight, compiled=where.type == "cuda")
    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate, weight_decay=0.01)
    records = train(student, distillation.loss, sources, Course(steps=steps, minutes=minutes), config)
    checkpoint.save(student, out, target)
    settings = {"steps": steps, "batch": batch, "length": sources[0].length, "overlap_weight": overlap_weight}
    settings |= {"seed": seed, "rate": rate, "parameters": checkpoint.num_parameters(student)}
    write_log(log, settings | {"sample_rows": len(sources[1].rows)}, records)


if __name__ == "__main__":
    options.run(main)
