"""A head and the target as processes of their own. `tests/gpu/test_cuda_eagle3.py` is the same on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.eagle3_serving import check_tokens


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["eagle3", "eagle", "mtp", "dflash"])
def test_tokens_are_those_of_plain_decoding(tmp_path_factory: pytest.TempPathFactory, algorithm: str) -> None:
    """Greedy and at T = 0.8, in float32."""
    folder: Path = tmp_path_factory.mktemp(algorithm)
    check_tokens(folder, "cpu", ("host",), algorithm)
