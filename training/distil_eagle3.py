"""Distil the EAGLE-3 head from the target, on the corpus and on the target's own samples."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from slipstream.training import checkpoint
from slipstream.training.distillation import TEMPERATURE, load_sources, train
from slipstream.training.eagle3 import Eagle3Head, HeadShape
from slipstream.training.llama import Llama
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import write_log

DEPTH_WEIGHT = 0.9
"""Weight of each depth's loss, relative to the depth before: a token counts only if those before are accepted."""


class Rollout(torch.nn.Module):
    """The loss of a batch: the head is rolled out from every position and compared with the target at each depth."""

    def __init__(self, head: Eagle3Head, teacher: Llama, *, depth: int, overlap_weight: float) -> None:
        super().__init__()
        self.head = head
        self._depth = depth
        self._overlap_weight = overlap_weight
        self._teacher = [teacher]  # not a part of what is trained

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``tokens``: int64 [batch, length]. Returns the loss and each depth's overlap, sum of min(p, q): [depth]."""
        teacher, depth = self._teacher[0], self._depth
        with torch.no_grad():
            states = teacher.states(tokens)
            fused = torch.cat([states[layer] for layer in self.head.shape.fused_layers], dim=-1)
            everything = torch.nn.functional.linear(teacher.model.norm(states[-1]), teacher.model.embed_tokens.weight)
            everything = everything.float() / TEMPERATURE
            log_p = everything[..., self.head.vocabulary] - everything.logsumexp(-1, keepdim=True)
            embedded = teacher.model.embed_tokens(tokens)
        loss, overlaps = torch.zeros((), device=tokens.device), []
        for step, logits in enumerate(self.head(embedded, fused, depth)):
            log_q = (logits.float() / TEMPERATURE).log_softmax(-1)
            log_target = log_p[:, step + 1 : step + 1 + logits.shape[1]]
            p = log_target.exp()
            overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
            kl = (p * (log_target - log_q)).sum(-1).mean()
            loss = loss + DEPTH_WEIGHT**step * (kl + self._overlap_weight * (1.0 - overlap))
            overlaps.append(overlap.detach())
        return loss / depth, torch.stack(overlaps)


def save(head: Eagle3Head, folder: Path) -> None:
    """Write the head in the layout of the paper's authors, rounded to bfloat16, without the target's embedding."""
    shape, vocabulary = head.shape, head.vocabulary.cpu()
    weights = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in head.state_dict().items()}
    weights["d2t"] = vocabulary - torch.arange(len(vocabulary))
    weights["t2d"] = torch.zeros(shape.target.vocab_size, dtype=torch.bool).index_fill(0, vocabulary, True)
    checkpoint.save_head(
        weights,
        shape.target,
        folder,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=shape.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(shape.fused_layers),
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )


def most_frequent(tokens: list[Tensor], count: int, vocab_size: int) -> Tensor:
    """The ``count`` most frequent token ids of all ``tokens``, ascending: int64."""
    counts = sum(torch.bincount(part.flatten().cpu(), minlength=vocab_size) / part.numel() for part in tokens)
    assert isinstance(counts, Tensor), "there are tokens to count"
    return counts.topk(count).indices.sort().values


def main(
    corpus: Annotated[Path, typer.Option(help="Folder with train.npy.")],
    samples: Annotated[list[Path], typer.Option(help="Rows that the sample command wrote; may be repeated.")],
    target: Annotated[Path, typer.Option(help="Folder of the target model.")],
    out: Annotated[Path, typer.Option(help="Folder for the head.")],
    log: Annotated[Path, typer.Option(help="The training log, JSON.")],
    steps: Annotated[int, typer.Option(help="Steps of one batch from each source.")] = 8000,
    minutes: Annotated[float, typer.Option(help="Stop here at the latest; the learning rate follows.")] = 10.0,
    batch: Annotated[int, typer.Option(help="Sequences of corpus a step; of samples, twice as many tokens.")] = 12,
    depth: Annotated[int, typer.Option(help="Tokens of a chain.")] = 5,
    overlap_weight: Annotated[float, typer.Option(help="Weight of 1 - overlap beside KL.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-3,
    seed: Annotated[int, typer.Option(help="Of weights and order.")] = 0,
    device: Annotated[str, typer.Option(help="PyTorch device.")] = "cuda",
) -> None:
    """Train the EAGLE-3 head on the target's distributions and write it as bfloat16."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    where = torch.device(device)
    text, own = load_sources(corpus, samples, where, batch=batch, seed=seed, samples_per_text=2)
    teacher = checkpoint.load_for_training(target).eval().requires_grad_(False)
    shape = HeadShape(target=teacher.shape)
    vocabulary = most_frequent([text.stream, own.rows], shape.draft_vocab_size, teacher.shape.vocab_size)
    head = Eagle3Head(shape, teacher, vocabulary).to(where)
    typer.echo(f"{checkpoint.num_parameters(head)} parameters")
    rollout = Rollout(head, teacher.to(where), depth=depth, overlap_weight=overlap_weight)
    compute = torch.compile(rollout, dynamic=False) if where.type == "cuda" else rollout

    def compare(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(where.type, dtype=torch.bfloat16):
            loss, overlaps = compute(tokens)
        return loss, overlaps

    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate / 4, weight_decay=0.01)
    records = train(head, compare, (text, own), Course(steps=steps, minutes=minutes), config)
    save(head, out)
    settings = {"steps": steps, "batch": batch, "length": text.length, "overlap_weight": overlap_weight, "seed": seed}
    settings |= {"depth": depth, "rate": rate, "parameters": checkpoint.num_parameters(head)}
    write_log(log, settings | {"sample_rows": len(own.rows)}, records)


if __name__ == "__main__":
    typer.run(main)
