"""Distil multi-token prediction modules from the target, on the corpus and on the target's own samples."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file
from torch import Tensor

from slipstream.training import checkpoint, options
from slipstream.training.distil_eagle3 import DEPTH_WEIGHT
from slipstream.training.distillation import TEMPERATURE, load_sources, train
from slipstream.training.llama import Llama
from slipstream.training.mtp import MtpHead, SharedOutputLoss
from slipstream.training.optimizer import Course, OptimizerConfig
from slipstream.training.run import Record, write_log

NUM_MODULES = 3
SHARED_PART = 0.4
"""Part of the time in which one module serves all draft tokens, and learns from all of them."""
FIT_TOKENS = 2**15
LOGIT_ROWS = {"cpu": 64, "cuda": 8192}
"""Rows whose logits are in memory together."""


class Comparison(torch.nn.Module):
    """The loss of a batch: what each module predicts is compared with the target."""

    def __init__(self, head: MtpHead, teacher: Llama, overlap_weight: float) -> None:
        super().__init__()
        self.head = head
        self._overlap_weight = overlap_weight
        self._teacher = [teacher]  # not a part of what is trained

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``tokens``: int64 [batch, length]. Returns the loss and each module's overlap: [modules]."""
        teacher, device = self._teacher[0], tokens.device.type
        output = teacher.model.embed_tokens.weight.to(torch.bfloat16)
        with torch.autocast(device, dtype=torch.bfloat16):
            with torch.no_grad():
                hidden, embedded = teacher.hidden(tokens), teacher.model.embed_tokens(tokens)
            states = self.head(embedded, hidden)
        loss, overlaps = torch.zeros((), device=tokens.device), []
        for step, state in enumerate(states):
            wanted = hidden[:, step + 1 : step + 1 + state.shape[1]]
            rows = [part.to(torch.bfloat16).flatten(0, 1) for part in (state, wanted)]
            settings = TEMPERATURE, self._overlap_weight, LOGIT_ROWS[device]
            part, overlap = SharedOutputLoss.apply(*rows, output, *settings)  # type: ignore[no-untyped-call]
            loss = loss + DEPTH_WEIGHT**step * part
            overlaps.append(overlap.detach())
        return loss / len(states), torch.stack(overlaps)


def load(head: MtpHead, folder: Path) -> None:
    """Give each draft token its own module, with the weights that ``save`` wrote."""
    head.separate()
    weights = load_file(folder / "model.safetensors")
    for number, module in enumerate(head.steps):
        prefix = f"model.layers.{head.shape.num_hidden_layers + number}."
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        module.load_state_dict(own)


def save(head: MtpHead, folder: Path) -> None:
    """Write the modules under DeepSeek's names, as bfloat16, without the target's embedding and output."""
    shape = head.shape
    weights = {
        f"model.layers.{shape.num_hidden_layers + number}.{name}": weight.detach().to("cpu", torch.bfloat16).clone()
        for number, module in enumerate(head.steps)
        for name, weight in module.state_dict().items()
    }
    num_modules = len(head.steps)
    checkpoint.save_head(weights, shape, folder, num_nextn_predict_layers=num_modules, tie_word_embeddings=True)


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
        typer.echo(f"{checkpoint.num_parameters(head)} parameters")
        config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate / 4, weight_decay=0.01)
        course = Course(steps=round(steps * part), minutes=minutes * part)
        records += train(head, Comparison(head, teacher, overlap_weight), sources, course, config)
        save(head, out)
        head.separate()
    settings = {"steps": steps, "batch": batch, "length": text.length, "overlap_weight": overlap_weight, "seed": seed}
    settings |= {"modules": NUM_MODULES, "rate": rate, "parameters": checkpoint.num_parameters(head)}
    write_log(log, settings | {"sample_rows": len(own.rows)}, records)


if __name__ == "__main__":
    options.run(main)
