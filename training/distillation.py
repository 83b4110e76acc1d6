"""Distils a draft: one batch of the corpus and one of the target's own samples in each step."""

import json
import sys
from pathlib import Path

import torch
import typer
from torch import Tensor, nn

from slipstream.common.errors import ConfigError
from slipstream.training import checkpoint
from slipstream.training.divergence import LossAndOverlap
from slipstream.training.optimizer import Course, Optimizer, OptimizerConfig
from slipstream.training.run import LOG_EVERY_STEPS, Record, SavedRun, Step, steps
from slipstream.training.windows import Rows, Windows, load_tokens

_NAMES = ("text", "own")
"""Names of sources in the log."""


def load_sources(
    corpus: Path,
    samples: list[Path],
    device: torch.device,
    *,
    batch: int,
    seed: int,
    samples_per_text: int = 1,
    length: int | None = None,
) -> tuple[Windows, Rows]:
    """Batches of the corpus, and of the target's own samples.

    ``batch``: windows of ``length`` tokens, a context's; of samples as many tokens, times ``samples_per_text``.
    Raises ``ConfigError`` for files that are too short for a batch, or for samples that are no rows of one length.
    """
    length = length or checkpoint.CONTEXT_TOKENS
    text = Windows(load_tokens(corpus / "train.npy", device), length=length, batch=batch, seed=seed)
    text.check("corpus")
    parts = [load_tokens(path, device) for path in samples]
    if any(part.ndim != 2 or part.shape[1] != parts[0].shape[1] for part in parts):
        given = ", ".join(f"{[*part.shape]} in {path}" for part, path in zip(parts, samples, strict=True))
        raise ConfigError("samples", given, "rows of one length, as the sample command writes them")
    rows = torch.cat(parts)
    num_rows = max(1, samples_per_text * batch * length // rows.shape[1])
    if len(rows) < num_rows:
        raise ConfigError("samples", f"{len(rows)} rows", f"at least {num_rows}, for one batch")
    return text, Rows(rows, batch=num_rows, seed=seed)


def train(
    student: nn.Module,
    compare: LossAndOverlap,
    sources: tuple[Windows] | tuple[Windows, Rows],
    course: Course,
    config: OptimizerConfig,
    saved: SavedRun | None = None,
    *,
    resumes: bool = False,
    length: int | None = None,
) -> list[Record]:
    """Train in place, one batch of each source a step; return the log. ``length``: of sequences at most.

    ``saved``: takes the run's state now and then, and when it is interrupted; ``resumes``: it has the state of a run
    that goes on, with the batches that would have followed.
    """
    typer.echo(f"{checkpoint.num_parameters(student)} parameters")
    optimizer = Optimizer(student, config)
    streams = [source.batches() for source in sources]
    longest = length or checkpoint.CONTEXT_TOKENS
    num_done, seconds, log = saved.load(student, optimizer) if saved and resumes else (0, 0.0, [])

    def backward() -> list[tuple[Tensor, Tensor]]:
        results = []
        for stream in streams:
            loss, overlap = compare(next(stream)[:, :longest])
            torch.autograd.backward(loss / len(streams))
            results.append((loss.detach(), overlap.detach()))
        return results

    backward()  # compile before the clock starts
    student.zero_grad(set_to_none=True)
    for _ in range(num_done):
        for stream in streams:
            next(stream)
    step, is_terminal = None, sys.stdout.isatty()
    try:
        with typer.progressbar(length=course.steps, label="distil") as bar:
            bar.update(num_done)
            for step in steps(optimizer, course, backward, num_done, seconds):
                bar.update(1)
                if step.is_logged:
                    log.append(_record(step))
                    bar.label = f"loss {log[-1]['text_loss']:.3f}"
                    if step.number % (10 * LOG_EVERY_STEPS) == 0 and not is_terminal:
                        typer.echo(json.dumps(log[-1]))
                if saved is not None:
                    saved.save_now_and_then(student, optimizer, step, log)
    except KeyboardInterrupt:
        if saved is not None and step is not None:
            saved.save(student, optimizer, step, log)
        raise
    return log


def _record(step: Step[list[tuple[Tensor, Tensor]]]) -> Record:
    record: Record = {"step": step.number, "seconds": step.seconds}
    for name, (loss, overlap) in zip(_NAMES, step.result, strict=False):
        record |= {f"{name}_loss": loss.item(), f"{name}_overlap": overlap.tolist()}
    return record
