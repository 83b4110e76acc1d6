"""Distil the EAGLE head from the target, on the corpus and on the target's own samples."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from slipstream.training import checkpoint, options
from slipstream.training.distil_eagle3 import DEPTH_WEIGHT
from slipstream.training.distil_mtp import FIT_TOKENS, LOGIT_ROWS
from slipstream.training.distillation import TEMPERATURE, load_sources, train
from slipstream.training.eagle import EagleHead
from slipstream.training.llama import Llama
from slipstream.training.mtp import SharedOutputLoss
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import write_log


class Rollout(torch.nn.Module):
    """The loss of a batch: the head is rolled out from every position and compared with the target at each depth."""

    def __init__(self, head: EagleHead, teacher: Llama, *, depth: int, overlap_weight: float, length: int) -> None:
        super().__init__()
        self.head = head
        self._depth, self._overlap_weight, self._length = depth, overlap_weight, length
        self._teacher = [teacher]  # not a part of what is trained

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``tokens``: int64 [batch, length]. Returns the loss and each depth's overlap, sum of min(p, q): [depth]."""
        teacher, device = self._teacher[0], tokens.device.type
        tokens = tokens[:, : self._length]
        output = teacher.model.embed_tokens.weight.to(torch.bfloat16)
        with torch.autocast(device, dtype=torch.bfloat16):
            with torch.no_grad():
                hidden, embedded = teacher.hidden(tokens), teacher.model.embed_tokens(tokens)
            states = self.head(embedded, hidden, self._depth)
        loss, overlaps = torch.zeros((), device=tokens.device), []
        for step, state in enumerate(states):
            wanted = hidden[:, step + 1 : step + 1 + state.shape[1]]
            rows = [part.to(torch.bfloat16).flatten(0, 1) for part in (state, wanted)]
            settings = TEMPERATURE, self._overlap_weight, LOGIT_ROWS[device]
            part, overlap = SharedOutputLoss.apply(*rows, output, *settings)  # type: ignore[no-untyped-call]
            loss = loss + DEPTH_WEIGHT**step * part
            overlaps.append(overlap.detach())
        return loss / len(states), torch.stack(overlaps)


def save(head: EagleHead, folder: Path) -> None:
    """Write the head in the layout of the paper's authors, rounded to bfloat16, without what is the target's."""
    weights = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in head.state_dict().items()}
    checkpoint.save_head(weights, head.shape, folder, bias=True, num_hidden_layers=1, tie_word_embeddings=False)


def main(
    corpus: options.Corpus,
    samples: options.Samples,
    target: options.Target,
    out: options.Out,
    log: options.Log,
    steps: options.Steps = 8000,
    minutes: options.Minutes = 10.0,
    batch: options.Batch = 12,
    length: Annotated[int, typer.Option(help="Tokens of a sequence of corpus at most.")] = checkpoint.CONTEXT_TOKENS,
    depth: Annotated[int, typer.Option(help="Tokens of a chain.")] = 4,
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
    typer.echo(f"{checkpoint.num_parameters(head)} parameters")
    rollout = Rollout(head, teacher, depth=depth, overlap_weight=overlap_weight, length=length)
    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate / 4, weight_decay=0.01)
    records = train(head, rollout, (text, own), Course(steps=steps, minutes=minutes), config)
    save(head, out)
    settings = {"steps": steps, "batch": batch, "length": length, "overlap_weight": overlap_weight, "seed": seed}
    settings |= {"depth": depth, "rate": rate, "parameters": checkpoint.num_parameters(head)}
    write_log(log, settings | {"sample_rows": len(own.rows)}, records)


if __name__ == "__main__":
    options.run(main)
