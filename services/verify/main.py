"""`slipstream-verify`: the verify service."""

from __future__ import annotations

from typing import Any

from slipstream.common.rpc.service_options import ServiceOptions, run_command
from slipstream.common.settings import with_options
from slipstream.common.worker.step import Role
from slipstream.services.worker.command_line import serve
from slipstream.services.worker.config import ONLY_DRAFT, WorkerConfig


def main() -> None:
    """Entry point."""
    run_command(verify)


@with_options(WorkerConfig, ServiceOptions, without=ONLY_DRAFT)
def verify(**values: Any) -> None:
    """Serves the target model, which checks what a draft proposes."""
    serve(Role.VERIFY, values)


if __name__ == "__main__":
    main()
