"""Distil the DFlash drafter from the target, on the corpus and on the target's own samples."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from slipstream.training import checkpoint, options
from slipstream.training.dflash import BlockDrafter, BlockShape
from slipstream.training.distil_mtp import LOGIT_ROWS
from slipstream.training.distillation import TEMPERATURE, load_sources, train
from slipstream.training.llama import Llama
from slipstream.training.mtp import SharedOutputLoss
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import write_log

PLACE_WEIGHT = 0.8
"""Weight of each place's loss in a block, relative to the place before: a token counts only if those before do."""


class Blocks(torch.nn.Module):
    """The loss of a batch: blocks at random places, compared with the target at each of their tokens."""

    def __init__(self, drafter: BlockDrafter, teacher: Llama, *, overlap_weight: float) -> None:
        super().__init__()
        self.drafter = drafter
        self._overlap_weight = overlap_weight
        self._teacher = [teacher]  # not a part of what is trained

    def states(self, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """The drafter's states and the target's for the same tokens: [places, batch * blocks, width] each."""
        teacher, shape = self._teacher[0], self.drafter.shape
        with torch.no_grad():
            every = teacher.states(tokens)
            last = teacher.model.norm(every.pop())
            read = torch.cat([(*every[1:], last)[number] for number in shape.target_layer_ids], dim=-1)
            places = anchors[..., None] + torch.arange(shape.block_size - 1, device=tokens.device)
            wanted = last.gather(1, places.flatten(1)[..., None].expand(-1, -1, last.shape[2]))
        found = self.drafter(tokens, read, anchors, teacher.model.embed_tokens.weight)
        width = last.shape[2]
        return found.flatten(0, 1).transpose(0, 1), wanted.view(-1, shape.block_size - 1, width).transpose(0, 1)

    def forward(self, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """``tokens``: int64 [batch, length]; ``anchors``: see ``BlockAttention``.

        Returns the loss and the overlap of each place, sum of min(p, q): [block_size - 1].
        """
        device, output = tokens.device.type, self._teacher[0].model.embed_tokens.weight.to(torch.bfloat16)
        found, wanted = self.states(tokens, anchors)
        loss, overlaps = torch.zeros((), device=tokens.device), []
        for place, pair in enumerate(zip(found, wanted, strict=True)):
            rows = [part.to(torch.bfloat16).contiguous() for part in pair]
            settings = TEMPERATURE, self._overlap_weight, LOGIT_ROWS[device]
            part, overlap = SharedOutputLoss.apply(*rows, output, *settings)  # type: ignore[no-untyped-call]
            loss = loss + PLACE_WEIGHT**place * part
            overlaps.append(overlap.detach())
        return loss / len(overlaps), torch.stack(overlaps)


def save(drafter: BlockDrafter, folder: Path) -> None:
    """Write the drafter in the layout of the paper's authors, as bfloat16, without embedding and output."""
    shape = drafter.shape
    weights = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in drafter.state_dict().items()}
    checkpoint.save_head(
        weights,
        shape.target,
        folder,
        architectures=["DFlashDraftModel"],
        block_size=shape.block_size,
        dflash_config={"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)},
        num_hidden_layers=shape.num_layers,
        num_target_layers=shape.target.num_hidden_layers,
        tie_word_embeddings=False,
    )


def main(
    corpus: options.Corpus,
    samples: options.Samples,
    target: options.Target,
    out: options.Out,
    log: options.Log,
    steps: options.Steps = 20000,
    minutes: options.Minutes = 10.0,
    batch: options.Batch = 12,
    length: options.Length = None,
    num_layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 4,
    block_size: Annotated[int, typer.Option(help="Tokens of a block, the first one included.")] = 8,
    overlap_weight: options.OverlapWeight = 1.0,
    rate: options.Rate = 3e-3,
    seed: options.Seed = 0,
    device: options.Device = "cuda",
) -> None:
    """Train the DFlash drafter on the target's distributions and write it as bfloat16."""
    where = options.begin(seed, device)
    text, own = sources = load_sources(
        corpus, samples, where, batch=batch, seed=seed, samples_per_text=2, length=length
    )
    teacher = checkpoint.load_for_training(target).eval().requires_grad_(False)
    # Of a token that text does not have nothing is unlearnt.
    counts = sum(
        torch.bincount(part.flatten().cpu(), minlength=teacher.shape.vocab_size) for part in (text.stream, own.rows)
    )
    assert isinstance(counts, Tensor), "there are tokens to count"
    last = teacher.shape.num_hidden_layers - 1
    shape = BlockShape(
        target=teacher.shape,
        mask_token_id=int(counts.argmin()),
        num_layers=num_layers,
        block_size=block_size,
        target_layer_ids=tuple(sorted({last // 3, last * 2 // 3, last})),
    )
    drafter = BlockDrafter(shape, teacher).to(where)
    typer.echo(f"{checkpoint.num_parameters(drafter)} parameters")
    blocks = Blocks(drafter, teacher.to(where), overlap_weight=overlap_weight)
    if where.type == "cuda":
        blocks.states = torch.compile(blocks.states, dynamic=False)  # type: ignore[method-assign]

    def compare(tokens: Tensor) -> tuple[Tensor, Tensor]:
        num_blocks = max(1, tokens.shape[1] // block_size)
        # A block ends in the text, and begins after its first token.
        anchors = torch.randint(1, tokens.shape[1] - block_size + 1, (len(tokens), num_blocks), device=where)
        with torch.autocast(where.type, dtype=torch.bfloat16):
            loss, overlaps = blocks(tokens, anchors)
        return loss, overlaps

    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate / 4, weight_decay=0.01)
    records = train(drafter, compare, sources, Course(steps=steps, minutes=minutes), config)
    save(drafter, out)
    settings = {"steps": steps, "batch": batch, "length": text.length, "overlap_weight": overlap_weight, "seed": seed}
    settings |= {"layers": num_layers, "block_size": block_size, "rate": rate}
    settings |= {"parameters": checkpoint.num_parameters(drafter), "sample_rows": len(own.rows)}
    write_log(log, settings, records)


if __name__ == "__main__":
    options.run(main)
