"""Fixtures for tests of the clients' side and of real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.checkpoints import write_checkpoint, write_guesser
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.seeded_jobs import SEED, make_jobs


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=SEED)


@pytest.fixture(scope="module")
def verify(target: Path) -> RoleEngine:
    """The target, loaded once."""
    return make_verify(WorkerConfig(model=target), HostDevice(), 0)


@pytest.fixture(scope="module")
def models(target: Path, verify: RoleEngine) -> Models:
    """The target, a draft that guesses right now and then, and one that always does."""
    guesser = write_guesser(target.with_name("draft"), target, seed=SEED)
    return Models(
        verify=verify,
        draft=make_draft(WorkerConfig(model=guesser), HostDevice(), 0),
        twin=make_draft(WorkerConfig(model=target), HostDevice(), 0),
        path=target,
    )


@pytest.fixture(scope="module")
def reference(verify: RoleEngine) -> list[list[int]]:
    """Plain decoding, one request at a time, nothing runs ahead."""
    way = Way(run_ahead=0, slots=1, chunk_tokens=64)
    outputs = Served(Models(verify, verify, verify), way).run(*([job] for job in make_jobs()))
    assert all(len(set(output)) > 5 for output in outputs), "the random model does not loop"
    return outputs
