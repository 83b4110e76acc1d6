"""A scheduler that has imported all it needs before it is told what to do, for measurements that start many.

    python -m slipstream.benchmarks.primed_scheduler MODULE

Says PRIMED on its standard output; has no connection by then, and nothing on a GPU. One line on its standard input, a
JSON list of arguments, starts the entry point of MODULE. It ends when that input ends without a line.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

PRIMED = "primed"


def main() -> None:
    """Entry point."""
    _, name = sys.argv
    module = import_module(name)
    _import_the_rest()
    print(PRIMED, flush=True)
    # Nobody reads the standard output any more: what else is said goes where the log goes.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line = sys.stdin.readline()
    if line:
        sys.argv[1:] = json.loads(line)
        module.main()


def _import_the_rest() -> None:
    """Imports what a scheduler imports only when it runs."""
    import_module("slipstream.scheduler.server")
    from slipstream.common.device.choose import cuda_obstacle

    if cuda_obstacle() is None:
        import_module("slipstream.benchmarks.policy_device")


if __name__ == "__main__":
    main()
