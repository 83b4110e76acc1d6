"""A head and the target as processes of their own that share a GPU's memory by CUDA IPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.eagle3_serving import check_tokens

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", ["eagle3", "eagle", "mtp", "dflash"])
def test_tokens_are_those_of_plain_decoding(tmp_path_factory: pytest.TempPathFactory, algorithm: str) -> None:
    """Greedy and at T = 0.8, in float32. `tests/scheduler/test_eagle3_processes.py` is the same on a CPU."""
    folder: Path = tmp_path_factory.mktemp(algorithm)  # a short name: the path of a socket has 107 bytes at most
    check_tokens(folder, "cuda", ("timeline", "event"), algorithm)
