"""The options that the commands of training share, and how a command begins and ends."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from slipstream.common.errors import CheckpointError, ConfigError

Corpus = Annotated[Path, typer.Option(help="Folder with train.npy.")]
Samples = Annotated[list[Path], typer.Option(help="Rows that the sample command wrote; may be repeated.")]
Target = Annotated[Path, typer.Option(help="Folder of the target model.")]
Out = Annotated[Path, typer.Option(help="Folder for what is trained.")]
Log = Annotated[Path, typer.Option(help="The training log, JSON.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of one batch from each source.")]
Minutes = Annotated[float, typer.Option(min=0.01, help="Stop here at the latest; the learning rate follows.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences of corpus a step; of samples, twice as many tokens.")]
Length = Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence of corpus; default: a context.")]
OverlapWeight = Annotated[float, typer.Option(help="Weight of 1 - overlap beside KL.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
Seed = Annotated[int, typer.Option(help="Of all that is random.")]
Device = Annotated[str, typer.Option(help="PyTorch device.")]


def begin(seed: int, device: str) -> torch.device:
    """Seeds PyTorch, lets it multiply fast, and returns the device. Raises ``ConfigError`` for one that is not here."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:  # the latter of a build without CUDA
        reason = str(error).partition("\n")[0]
        raise ConfigError("device", device, f"a device that this PyTorch has, such as cpu ({reason})") from None
    return where


def run(main: Callable[..., None]) -> None:
    """Runs a command: a wrong option, file or folder is one line, and status 2."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    try:
        app()
    except (CheckpointError, ConfigError, OSError) as error:
        typer.echo(f"slipstream: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
