"""What the scripts that serve models of your choice are given on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.benchmarks.serving_stack import EAGLE3, STANDALONE, Models

DEVICES = ("cpu", "cuda")


def _known_device(value: str) -> str:
    if value not in DEVICES:
        raise typer.BadParameter(" or ".join(DEVICES))
    return value


DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.", callback=_known_device)]
TargetOption = Annotated[
    Path | None, typer.Option("--target", help="Directory of the target; the bundled one and its draft.")
]
StandaloneOption = Annotated[Path | None, typer.Option("--standalone", help="Directory of a standalone draft.")]
Eagle3Option = Annotated[Path | None, typer.Option("--eagle3", help="Directory of an EAGLE-3 head.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Where to write the report.")]
PictureOption = Annotated[Path | None, typer.Option("--picture", help="Where to draw it.")]


def chosen_models(*, target: Path | None, standalone: Path | None, eagle3: Path | None, device: str) -> Models:
    """The models that were named, or the bundled ones."""
    return Models.choose(target=target, drafts={STANDALONE: standalone, EAGLE3: eagle3}, device=device)
