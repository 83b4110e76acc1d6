"""A draft or verify service with dummy kernels in place of its model.

    python -m slipstream.benchmarks.dummy_worker draft|verify --length-ms MS --model DIR --listen unix:PATH …

The model gives the description alone; no weights are loaded.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path  # noqa: TC003 - read at run time by the command line
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.common.rpc.logs import CONSOLE
from slipstream.common.worker.step import Role
from slipstream.services.worker.command_line import ServeOptions, serve
from slipstream.services.worker.config import WorkerConfig

if TYPE_CHECKING:
    from slipstream.common.device.interface import Device
    from slipstream.services.worker.engine import RoleEngine


def dummy_worker(role: str, length_ms: float, *options: str) -> tuple[str, ...]:
    """The command line of a dummy; `options` are those of `main` that remain."""
    module = (sys.executable, "-P", "-m", "slipstream.benchmarks.dummy_worker")
    return (*module, role, "--length-ms", f"{length_ms:g}", *options)


def main(
    role: Role,
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the model.")],
    listen: Annotated[str, typer.Option(help="unix:PATH, in a directory that only this user opens.")],
    length_ms: Annotated[float, typer.Option(min=0, max=60_000, help="Length of a step's kernel.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = WorkerConfig.device,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port on loopback; 0 is any free one.")] = 0,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    acknowledge_done: Annotated[bool, typer.Option("--acknowledge-done", help="As the service's own.")] = False,
) -> None:
    """Serves a dummy."""
    serve(
        role,
        ServeOptions(listen=listen, metrics_port=metrics_port, log_level=log_level, log_format=CONSOLE),
        lambda: WorkerConfig(model=model, device=device, acknowledge_done=acknowledge_done),
        make_role=partial(make_dummy, role, length_ms),
    )


def make_dummy(role: Role, length_ms: float, config: WorkerConfig, device: Device, metrics_port: int) -> RoleEngine:
    """Implements `MakeRole`, but for the first two."""
    # Here, as this is heavy: the address is claimed before.
    from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
    from slipstream.services.worker.factory import describe_draft, describe_verify

    if role is Role.DRAFT:
        return DummyDraft(describe_draft(config, device, metrics_port), length_ms, device)
    return DummyVerify(describe_verify(config, device, metrics_port), length_ms, device)


if __name__ == "__main__":
    typer.run(main)
