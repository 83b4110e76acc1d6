"""Runs the checks at an address and prints a line for each."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from slipstream.cli.conformance.bench import Bench, describe
from slipstream.cli.conformance.checks import CHECKS, run_checks
from slipstream.common.device.choose import AUTO, CPU, CUDA, choose_device
from slipstream.common.device.manifest import TIMELINE
from slipstream.common.errors import FailedPreconditionError, UnavailableError
from slipstream.scheduler.workers.link import LinkThread

if TYPE_CHECKING:
    from slipstream.common.worker.contract import WorkerDescription


def run_check_drafter(address: str, device: str, *, timeout_s: float) -> int:
    """Returns 1 if the drafter at `address` breaks the contract. `device`: "cpu", "cuda" or "auto", the drafter's own.

    Raises UnavailableError if nobody answers, FailedPreconditionError if the drafter has a scheduler, ConfigError.
    """
    thread = LinkThread()
    try:
        draft = _describe(address, thread)
        if draft.has_scheduler:
            raise FailedPreconditionError("the drafter has a scheduler: start one for the check alone")
        if device == AUTO:
            device = CPU if draft.device == CPU else CUDA
        chosen = choose_device(device, AUTO if device == CPU else TIMELINE)
        with closing(Bench(address, chosen, thread, timeout_s=timeout_s)) as bench:
            return _print_checks(bench, draft.model)
    finally:
        thread.close()


def _describe(address: str, thread: LinkThread) -> WorkerDescription:
    try:
        return describe(address, thread)
    except UnavailableError as error:
        raise UnavailableError(f"no drafter answers at {address}: {error}") from error


def _print_checks(bench: Bench, model: str) -> int:
    num_made = num_broken = 0
    for name, broken in run_checks(bench):
        print(f"✗ {name}: {broken}" if broken else f"✓ {name}", flush=True)
        num_made, num_broken = num_made + 1, num_broken + bool(broken)
    print(f"\n{model}: {num_made} of {len(CHECKS)} checks made, {num_broken} broken")
    return 1 if num_broken else 0
