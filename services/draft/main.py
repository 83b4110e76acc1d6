"""`slipstream-draft`: the draft service."""

from __future__ import annotations

from typing import Any

from slipstream.common.rpc.service_options import ServiceOptions, run_command
from slipstream.common.settings import with_options
from slipstream.common.worker.step import Role
from slipstream.services.worker.command_line import serve
from slipstream.services.worker.config import ONLY_VERIFY, WorkerConfig


def main() -> None:
    """Entry point."""
    run_command(draft)


@with_options(WorkerConfig, ServiceOptions, without=ONLY_VERIFY)
def draft(**values: Any) -> None:
    """Serves a draft model, which proposes tokens."""
    serve(Role.DRAFT, values)


if __name__ == "__main__":
    main()
