"""The EAGLE-3 head and the target as processes of their own. `tests/gpu/test_cuda_eagle3.py` is the same on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.eagle3_serving import check_tokens

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Greedy and at T = 0.8, in float32."""
    folder: Path = tmp_path_factory.mktemp("eagle3")
    check_tokens(folder, "cpu", ("host",))
