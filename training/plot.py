"""Loss curves from the training logs, as a picture."""

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SMOOTHING = 0.9


def smooth(values: list[float]) -> list[float]:
    """Exponential moving average: a batch's loss is noisy."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else SMOOTHING * out[-1] + (1 - SMOOTHING) * value)
    return out


def draw_target(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """Held-out loss of every run, and the first run's training loss."""
    records = runs[0]["log"]
    seen = [record["tokens"] / 1e6 for record in records]
    axes.plot(seen, smooth([record["loss"] for record in records]), color="0.75", label="training, with dropout")
    for number, run in enumerate(runs):
        settings = run["settings"]
        marked = [record for record in run["log"] if "heldout_loss" in record]
        axes.plot(
            [record["tokens"] / 1e6 for record in marked],
            [record["heldout_loss"] for record in marked],
            label=f"held out, dropout {settings['dropout']}, decay {settings['weight_decay']}",
            color=f"C{number}",
            linewidth=2.0 if number == 0 else 1.0,
        )
    axes.set(title="Target", xlabel="million tokens seen", ylabel="nats per token", ylim=(1.2, 3.0))
    axes.legend(fontsize=7)


def draw_draft(axes: Axes, run: dict[str, Any]) -> None:
    """Overlap of the draft's distribution with the target's."""
    steps = [record["step"] for record in run["log"]]
    for key, label in (("text_overlap", "on the corpus"), ("own_overlap", "on the target's samples")):
        axes.plot(steps, smooth([record[key] for record in run["log"]]), label=label)
    axes.set(title="Standalone draft", xlabel="step", ylabel="sum of min(p, q) at T = 0.8", ylim=(0.3, 1.0))
    axes.legend(fontsize=7)


def main(
    target: Annotated[list[Path], typer.Option(help="Logs of target runs; the first is the one kept.")],
    standalone: Annotated[Path, typer.Option(help="Log of the draft's distillation.")],
    out: Annotated[Path, typer.Option(help="The picture, PNG.")],
) -> None:
    """Draw the training of the target and of its draft."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    draw_target(left, [json.loads(path.read_text()) for path in target])
    draw_draft(right, json.loads(standalone.read_text()))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    typer.run(main)
