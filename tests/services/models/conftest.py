"""Checkpoints that several tests read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.checkpoints import write_checkpoint
from tests.harness.paged_model import PagedModel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with grouped-query attention."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def model(checkpoint: Path) -> PagedModel:
    """The Llama of `checkpoint` with a fresh cache."""
    return PagedModel(checkpoint, seed=1)
