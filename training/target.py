"""Train the target model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from slipstream.training import checkpoint, options
from slipstream.training.llama import Llama
from slipstream.training.optimizer import Course, Optimizer, OptimizerConfig
from slipstream.training.run import LOG_EVERY_STEPS, Record, Step, steps, write_log
from slipstream.training.windows import Windows, load_tokens


def token_loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token over ``batch`` int64 [batch, length + 1]."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: Llama, stream: Tensor, length: int) -> float:
    """Nats per token over windows of ``length`` tokens side by side: quick, for the log."""
    count = min(512, (len(stream) - 1) // length)
    rows = torch.arange(count, device=stream.device)[:, None] * length + torch.arange(length + 1, device=stream.device)
    losses = [token_loss(model, stream[part].long()) for part in torch.split(rows, 32)]
    return float(torch.stack(losses).mean())


def train(model: Llama, windows: Windows, heldout: Tensor, course: Course, config: OptimizerConfig) -> list[Record]:
    """Train in place; return the log: step, tokens, seconds, loss and now and then held-out loss."""
    on_gpu = windows.stream.device.type == "cuda"
    compiled = torch.compile(model) if on_gpu else model
    optimizer = Optimizer(model, config)
    log: list[Record] = []
    eval_every = max(LOG_EVERY_STEPS, course.steps // 20 // LOG_EVERY_STEPS * LOG_EVERY_STEPS)
    batches = windows.batches()
    model.train()
    if on_gpu:
        torch.autograd.backward(token_loss(compiled, next(batches)))  # compile before the clock starts
        model.zero_grad(set_to_none=True)

    def backward() -> Tensor:
        loss = token_loss(compiled, next(batches))
        torch.autograd.backward(loss)
        return loss

    def record_of(step: Step[Tensor]) -> Record:
        tokens = step.number * windows.batch * windows.length
        return {"step": step.number, "tokens": tokens, "loss": step.result.item(), "seconds": step.seconds}

    for step in steps(optimizer, course, backward):
        if step.is_logged:
            log.append(record_of(step))
        if step.number % eval_every == 0:
            model.eval()
            log[-1]["heldout_loss"] = heldout_loss(model, heldout, windows.length)
            model.train()
            typer.echo(json.dumps(log[-1]))
    model.eval()
    log.append(record_of(step) | {"heldout_loss": heldout_loss(model, heldout, windows.length)})
    typer.echo(json.dumps(log[-1]))
    return log


def main(
    corpus: Annotated[Path, typer.Option(help="Folder with train.npy and heldout.npy.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    out: options.Out,
    log: options.Log,
    epochs: Annotated[float, typer.Option(help="Passes over the training text.")] = 20.0,
    minutes: options.Minutes = 10.0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 64,
    dropout: Annotated[float, typer.Option(help="On the embedding and each layer's two branches.")] = 0.2,
    weight_decay: Annotated[float, typer.Option(help="Decoupled; none on norms.")] = 0.5,
    rate: options.Rate = 4e-3,
    seed: options.Seed = 0,
    device: options.Device = "cuda",
) -> None:
    """Train the target model on the training tokens and write it as bfloat16."""
    where = options.begin(seed, device)
    length = checkpoint.CONTEXT_TOKENS
    windows = Windows(load_tokens(corpus / "train.npy", where), length=length, batch=batch, seed=seed)
    windows.check("corpus")
    heldout = load_tokens(corpus / "heldout.npy", where)
    model = Llama(checkpoint.TARGET, dropout).to(where)
    steps = max(1, round(epochs * windows.batches_per_epoch))
    typer.echo(f"{checkpoint.num_parameters(model)} parameters, {steps} steps")
    config = OptimizerConfig(matrix_rate=rate, embedding_rate=rate, weight_decay=weight_decay)
    records = train(model, windows, heldout, Course(steps=steps, minutes=minutes), config)
    checkpoint.save(model, out, tokenizer)
    settings = {"epochs": epochs, "batch": batch, "length": length, "dropout": dropout, "seed": seed}
    settings |= {"weight_decay": weight_decay, "rate": rate, "parameters": checkpoint.num_parameters(model)}
    write_log(log, settings, records)


if __name__ == "__main__":
    options.run(main)
