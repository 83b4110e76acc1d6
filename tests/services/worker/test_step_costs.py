"""The times of steps that workers measure when they are attached."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from slipstream.bundled import eagle3_dir, target_dir
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.wire.layout import EpochShape
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.worker import graphs, step_costs
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.step_costs import BUDGET_S, measure_costs
from tests.harness.inline_device import InlineDevice
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import local_workers

CPU = torch.device("cpu")
SHAPE = EpochShape(num_slots=7, run_ahead=1, num_draft_tokens=4, chunk_tokens=8)


def measured(monkeypatch: pytest.MonkeyPatch, token_ms: float) -> tuple[dict[tuple[int, int], float], float]:
    """The times in ms by rows and draft tokens, and how long all took; those of three rows cannot be measured."""
    clock = SimpleNamespace(ms=0.0)
    monkeypatch.setattr(graphs, "_wait_for", lambda _: None)
    for module in (graphs, step_costs):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.ms / 1000))

    def make_step(num_rows: int, count: int) -> Callable[[], None] | None:
        def work() -> None:
            clock.ms += token_ms * num_rows * (count + 1)

        return work if num_rows != 4 else None

    costs = measure_costs(SHAPE, make_step, CPU)
    return {(cost.rows, cost.draft_tokens): cost.ns / 1e6 for cost in costs}, clock.ms / 1000


def test_steps_of_about_every_size_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, token_ms=0.1)
    assert found.keys() == {(rows, count) for rows in (1, 2, 6) for count in (0, 1, 2, 4)}
    assert found == pytest.approx({(rows, count): 0.1 * rows * (count + 1) for rows, count in found})


def test_what_ran_beside_a_measurement_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes no longer than a larger one."""
    monkeypatch.setattr(step_costs, "shortest_seconds", lambda work, _: work())
    bursts = {(1, 1): 30.0, (2, 4): 25.0}

    def make_step(num_rows: int, count: int) -> Callable[[], None]:
        return lambda: bursts.get((num_rows, count), num_rows * (count + 1.0)) / 1000  # type: ignore[return-value]

    found = {(cost.rows, cost.draft_tokens): cost.ns / 1e6 for cost in measure_costs(SHAPE, make_step, CPU)}
    assert found[1, 1] == found[1, 2] == 3
    assert found[2, 4] == found[4, 4] == 20
    assert found[6, 4] == 30


def test_where_steps_are_long_only_small_ones_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seconds = measured(monkeypatch, token_ms=20.0)
    assert (1, 0) in found
    assert (6, 4) not in found
    assert seconds < BUDGET_S


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make_device", [HostDevice, InlineDevice])
@pytest.mark.parametrize("algorithm", ["ngram", "eagle3"])
def test_an_epoch_that_chooses_draft_tokens_begins_with_what_steps_cost(
    make_device: Callable[[], Device], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps by graphs and without; one with a fixed number measures nothing."""
    monkeypatch.setattr(step_costs, "BUDGET_S", 60.0)  # on a busy machine, too
    monkeypatch.setattr(step_costs, "DRAFT_TOKENS", (0, 15))
    device, target = make_device(), target_dir()
    model = eagle3_dir() if algorithm == "eagle3" else None
    roles = (
        make_verify(WorkerConfig(model=target), device, 0),
        make_draft(WorkerConfig(model=model, algorithm=algorithm, target=target), device, 0),
    )
    with local_workers(*roles, device=device) as workers:
        for number, fixed in ((1, None), (9, 4)):
            config = SchedulerConfig(
                verify="unix:/none", slots=2, context_tokens=256, max_batched_tokens=32, fixed_draft_tokens=fixed
            )
            epoch = LocalEpoch(number, config, workers, device=device)
            with epoch.loop():
                choice, costs = epoch.epoch.choice, epoch.attachments[0].costs
                assert (choice is None) is (fixed is not None)
                assert bool(costs) is (fixed is None)
                if choice is not None:
                    assert choice.costs.knows_drafts
                    assert choice.costs.undrafted(-1, 1) > 0
