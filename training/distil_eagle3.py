"""Distil an EAGLE-3 head from a target, on texts: best on such as the target writes."""

import hashlib
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from slipstream.common.errors import ConfigError
from slipstream.services.models.checkpoint import LoadFormat
from slipstream.training import checkpoint, options
from slipstream.training.distillation import train
from slipstream.training.divergence import DEPTH_WEIGHT, TEMPERATURE, divergence, log_distribution
from slipstream.training.eagle3 import Eagle3Head, HeadShape
from slipstream.training.llama import LlamaShape
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import Record, SavedRun, write_log
from slipstream.training.teacher import Teacher
from slipstream.training.texts import read_texts
from slipstream.training.windows import Windows

STATE = "run.pt"
"""File in the head's folder from which an ended run goes on."""


class Rollout(torch.nn.Module):
    """The loss of a batch: the head is rolled out from every position and compared with the target at each depth."""

    def __init__(self, head: Eagle3Head, *, depth: int, overlap_weight: float) -> None:
        super().__init__()
        self.head = head
        self._depth = depth
        self._overlap_weight = overlap_weight

    def forward(self, embedded: Tensor, fused: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """``embedded``, ``fused``: see ``Eagle3Head``. ``log_p``: the target's, [batch, length, draft_vocab_size].

        Returns the loss and each depth's overlap, sum of min(p, q): [depth].
        """
        loss, overlaps = torch.zeros((), device=embedded.device), []
        for step, logits in enumerate(self.head(embedded, fused, self._depth)):
            wanted = log_p[:, step + 1 : step + 1 + logits.shape[1]]
            part, overlap = divergence(log_distribution(logits), wanted, self._overlap_weight)
            loss = loss + DEPTH_WEIGHT**step * part
            overlaps.append(overlap.detach())
        return loss / self._depth, torch.stack(overlaps)


def save(head: Eagle3Head, folder: Path) -> None:
    """Write the head in the layout of the paper's authors, rounded to bfloat16, without the target's embedding."""
    shape, vocabulary = head.shape, head.vocabulary.cpu()
    weights = checkpoint.rounded(head)
    weights["d2t"] = vocabulary - torch.arange(len(vocabulary))
    weights["t2d"] = torch.zeros(shape.layer.vocab_size, dtype=torch.bool).index_fill(0, vocabulary, True)
    checkpoint.save_head(
        weights,
        shape.layer,
        folder,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=shape.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(shape.fused_layers),
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )


def shape_for(teacher: Teacher, draft_vocab_size: int, intermediate_size: int | None) -> HeadShape:
    """A head's shape: the target's width, heads and RoPE."""
    target = teacher.config
    layer = LlamaShape(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope.theta,
    )
    return HeadShape(
        layer=layer, draft_vocab_size=min(draft_vocab_size, target.vocab_size), fused_layers=teacher.fused_layers
    )


def most_frequent(tokens: Tensor, count: int, vocab_size: int) -> Tensor:
    """The ``count`` most frequent token ids, ascending: int64."""
    return torch.bincount(tokens, minlength=vocab_size).topk(count).indices.sort().values


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.cpu().numpy().data).hexdigest()


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target model, of any kind that is served.")],
    data: Annotated[list[Path], typer.Option(help="Texts: .npy of token ids, .txt or .jsonl; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Folder for the head, and for the state of a run that is ended.")],
    log: Annotated[Path | None, typer.Option(help="The training log, JSON; default: in the head's folder.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of one batch.")] = 8000,
    minutes: options.Minutes = 600.0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 1024,
    depth: Annotated[int, typer.Option(min=1, help="Tokens of a chain.")] = 5,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that the head drafts, the most frequent ones.")] = 32_000,
    intermediate_size: Annotated[int | None, typer.Option(help="Of the head's MLP; default: the target's.")] = None,
    overlap_weight: options.OverlapWeight = 1.0,
    rate: options.Rate = 1e-3,
    seed: options.Seed = 0,
    device: options.Device = "cuda",
    load_format: Annotated[LoadFormat, typer.Option(help="dummy: random weights, to measure.")] = LoadFormat.AUTO,
    resume: Annotated[bool, typer.Option(help="Go on with the run whose state is in the head's folder.")] = False,
) -> None:
    """Train an EAGLE-3 head on the target's distributions and write it as bfloat16."""
    where = options.begin(seed, device)
    if not resume and (out / STATE).exists():
        raise ConfigError("out", str(out), f"a folder without the {STATE} of a run that was ended, or --resume")
    text = Windows(read_texts(data, target).to(where), length=length, batch=batch, seed=seed)
    text.check("data")
    teacher = Teacher(target, where, load_format=load_format)
    if length > (most := teacher.config.max_position_embeddings):
        raise ConfigError("length", length, f"at most {most}, the target's context")
    shape = shape_for(teacher, draft_vocab, intermediate_size)
    vocabulary = most_frequent(text.stream.cpu(), shape.draft_vocab_size, shape.layer.vocab_size)
    norm, output = teacher.decoder.norm.weight.detach(), teacher.output_rows(vocabulary)
    head = Eagle3Head(shape, vocabulary, norm, output, num_positions=length).to(where)
    rollout = Rollout(head, depth=depth, overlap_weight=overlap_weight)
    compute = torch.compile(rollout, dynamic=False) if where.type == "cuda" else rollout

    def compare(tokens: Tensor) -> tuple[Tensor, Tensor]:
        fused, hidden = teacher.states(tokens)
        log_p = teacher.log_probabilities(hidden, TEMPERATURE, head.vocabulary)
        embedded = torch.nn.functional.embedding(tokens, teacher.embedding)
        with torch.autocast(where.type, dtype=torch.bfloat16):
            loss, overlaps = compute(embedded, fused, log_p)
        return loss, overlaps

    settings: Record = {"batch": batch, "length": length, "depth": depth, "rate": rate, "steps": steps, "seed": seed}
    settings |= {"overlap_weight": overlap_weight, "parameters": checkpoint.num_parameters(head)}
    # Of other texts other tokens are the most frequent, and a head is for its target.
    settings |= {"data": _digest(text.stream), "target": _digest(output)}
    saved = SavedRun(out / STATE, settings)
    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate / 4, weight_decay=0.01)
    course = Course(steps=steps, minutes=minutes)
    records = train(head, compare, (text,), course, config, saved, resumes=resume, length=length)
    save(head, out)
    saved.remove()
    write_log(log or out / "training.json", settings, records)
    if records:
        typer.echo(f"{batch * length * records[-1]['step'] / records[-1]['seconds']:.0f} tokens/s")


if __name__ == "__main__":
    options.run(main)
