"""`python -m slipstream.services.rank_main`: a rank of a target after the first, started by verify, which is rank 0."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import Any

from slipstream.common.errors import SlipstreamError
from slipstream.common.host import end_with_parent
from slipstream.common.rpc.logs import configure_logging
from slipstream.common.rpc.service_options import LogSettings, report, run_command
from slipstream.common.settings import Settings, setting, shared, with_options
from slipstream.services.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class RankOptions(Settings, heading="Rank"):
    """A rank's place among the others."""

    rank: int = setting(help="Its number.", unit="N", low=1, high=7)
    store: int = setting(help="Descriptor of the file by which the ranks meet.", unit="N", low=0, high=2**31)
    connection: int = setting(help="Descriptor of the socket to rank 0.", unit="N", low=0, high=2**31)
    parent: int = setting(help="Rank 0's process, with which this one ends.", unit="PID", low=1, high=2**31)


@with_options(WorkerConfig, RankOptions, LogSettings)
def serve(**values: Any) -> None:
    """Does what rank 0 tells it."""
    options = shared(RankOptions, values)
    end_with_parent(options.parent)
    name = f"verify-rank-{options.rank}"
    configure_logging(name, values["log_level"], values["log_format"])
    config = shared(WorkerConfig, values)
    from slipstream.services.factory import follow

    with socket.socket(fileno=options.connection) as connection:
        try:
            follow(config, options.rank, options.store, connection)
        except SlipstreamError as error:
            sys.exit(report(name, error))


def main() -> None:
    run_command(serve)


if __name__ == "__main__":
    main()
