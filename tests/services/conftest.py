"""Workers of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.harness.eagle3_checkpoints import write_head
from tests.harness.hosted import Hosted
from tests.harness.leaks import nothing_left
from tests.harness.recording_role import Recorder
from tests.harness.served_worker import serving


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=5)


def _verify(target: Path) -> RoleEngine:
    return make_verify(WorkerConfig(model=target), HostDevice(), 0)


def _standalone(target: Path) -> RoleEngine:
    return make_draft(WorkerConfig(model=target), HostDevice(), 0)


def _eagle3(target: Path) -> RoleEngine:
    head = write_head(target.with_name("head"), has_embedding=False, draft_vocab_size=VOCAB_SIZE)
    return make_draft(WorkerConfig(model=head, target=target, algorithm=EAGLE3), HostDevice(), 0)


@pytest.fixture(scope="module", params=[_verify, _standalone, _eagle3], ids=["verify", "standalone", "eagle3"])
def hosted(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """Each kind of worker."""
    role = request.param(target)
    with serving(role, tmp_path_factory.mktemp("socket")) as worker:
        made = Hosted(worker, role)
        made.check_it_works()
        yield made


@pytest.fixture
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every epoch of the test gives its memory back."""
    with nothing_left():
        yield
        # pytest would keep the arguments a little longer.
        request.node.funcargs.clear()


@pytest.fixture
def draft() -> Recorder:
    """A draft that records."""
    return Recorder()
