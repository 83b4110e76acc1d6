"""A draft or verify service with dummy kernels in place of its model.

    python -m slipstream.benchmarks.dummy_worker draft|verify --length-ms MS --model DIR --listen unix:PATH …

The model gives only the description; no weights are loaded.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.common.rpc.service_options import ServiceOptions, run_command
from slipstream.common.settings import with_options
from slipstream.common.wire.step import Role
from slipstream.services.command_line import serve
from slipstream.services.worker.config import WorkerConfig

if TYPE_CHECKING:
    from slipstream.common.device.interface import Device
    from slipstream.services.worker.engine import RoleEngine


def dummy_worker(role: str, length_ms: float, *options: str) -> tuple[str, ...]:
    """The command line of a dummy; `options` are those of `main` that remain."""
    module = (sys.executable, "-P", "-m", "slipstream.benchmarks.dummy_worker")
    return (*module, role, "--length-ms", f"{length_ms:g}", *options)


@with_options(WorkerConfig, ServiceOptions)
def main(
    role: Role,
    length_ms: Annotated[float, typer.Option(min=0, max=60_000, help="Length of a step's kernel.")],
    **values: Any,
) -> None:
    """Serves a dummy."""
    serve(role, values, make_role=partial(make_dummy, role, length_ms))


def make_dummy(role: Role, length_ms: float, config: WorkerConfig, device: Device, metrics_port: int) -> RoleEngine:
    """Implements `MakeRole`, but for the first two."""
    # Here, as this is heavy: the address is claimed before.
    from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
    from slipstream.services.factory import describe_draft, describe_verify

    if role is Role.DRAFT:
        return DummyDraft(describe_draft(config, device, metrics_port), length_ms, device)
    return DummyVerify(describe_verify(config, device, metrics_port), length_ms, device)


if __name__ == "__main__":
    run_command(main)
