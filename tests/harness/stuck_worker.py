"""A dummy draft service's process whose stream cannot be released, and whose arena cannot be closed meanwhile.

So it is on a GPU with event fences whose producer is gone. The command line is that of a dummy.
"""

from __future__ import annotations

import threading

from slipstream.benchmarks.dummy_worker import main
from slipstream.common.device.cpu.device import HostArena
from slipstream.common.device.cpu.fence import HostFence, ReadOnlyFence
from slipstream.common.rpc.service_options import run_command
from slipstream.services.worker import epoch


def _never(*_: object) -> None:
    threading.Event().wait()


def _nothing(*_: object) -> None:
    """Does nothing: a release that nobody sees."""


if __name__ == "__main__":
    epoch.HOPELESS_TIMEOUT_S = 0.1
    HostFence.is_releasable = False
    HostFence.release = ReadOnlyFence.release = _nothing  # type: ignore[method-assign]
    HostArena.close = _never  # type: ignore[method-assign]
    run_command(main)
