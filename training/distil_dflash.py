"""Distil the DFlash drafter from the target, on the corpus and on the target's own samples."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from slipstream.training import checkpoint, options
from slipstream.training.dflash import BlockDrafter, BlockShape
from slipstream.training.distillation import load_sources, train
from slipstream.training.divergence import compare_states
from slipstream.training.llama import Llama
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import write_log

PLACE_WEIGHT = 0.8
"""Weight of each place's loss in a block, relative to the place before: a token counts only if those before do."""


def block_states(drafter: BlockDrafter, teacher: Llama, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """The drafter's states and the target's for the same tokens: [places, batch * blocks, width] each.

    ``tokens``: int64 [batch, length]; ``anchors``: see ``BlockAttention``.
    """
    shape = drafter.shape
    with torch.no_grad():
        every = teacher.states(tokens)
        last = teacher.model.norm(every.pop())
        read = torch.cat([(*every[1:], last)[number] for number in shape.target_layer_ids], dim=-1)
        places = anchors[..., None] + torch.arange(shape.block_size - 1, device=tokens.device)
        wanted = last.gather(1, places.flatten(1)[..., None].expand(-1, -1, last.shape[2]))
    found = drafter(tokens, read, anchors, teacher.model.embed_tokens.weight)
    width = last.shape[2]
    return found.flatten(0, 1).transpose(0, 1), wanted.view(-1, shape.block_size - 1, width).transpose(0, 1)


def save(drafter: BlockDrafter, folder: Path) -> None:
    """Write the drafter in the layout of the paper's authors, as bfloat16, without embedding and output."""
    shape = drafter.shape
    checkpoint.save_head(
        checkpoint.rounded(drafter),
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
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of the drafter.")] = 4,
    block_size: Annotated[int, typer.Option(min=2, help="Tokens of a block, the first one included.")] = 8,
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
    output = teacher.to(where).model.embed_tokens.weight.to(torch.bfloat16)
    states = torch.compile(block_states, dynamic=False) if where.type == "cuda" else block_states

    def compare(tokens: Tensor) -> tuple[Tensor, Tensor]:
        num_blocks = max(1, tokens.shape[1] // block_size)
        # A block ends in the text, and begins after its first token.
        anchors = torch.randint(1, tokens.shape[1] - block_size + 1, (len(tokens), num_blocks), device=where)
        with torch.autocast(where.type, dtype=torch.bfloat16):
            pairs = zip(*states(drafter, teacher, tokens, anchors), strict=True)
        return compare_states(pairs, output, overlap_weight, PLACE_WEIGHT)

    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate / 4, weight_decay=0.01)
    records = train(drafter, compare, sources, Course(steps=steps, minutes=minutes), config)
    save(drafter, out)
    settings = {"steps": steps, "batch": batch, "length": text.length, "overlap_weight": overlap_weight, "seed": seed}
    settings |= {"layers": num_layers, "block_size": block_size, "rate": rate}
    settings |= {"parameters": checkpoint.num_parameters(drafter), "sample_rows": len(own.rows)}
    write_log(log, settings, records)


if __name__ == "__main__":
    options.run(main)
