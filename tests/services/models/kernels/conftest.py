"""The kernels run on the GPU where there is one, and in Triton's interpreter elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the kernels' tests as tests of the GPU where there is one."""
    here = Path(__file__).parent
    for item in items:
        if HAS_CUDA and here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which the kernels run."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


# Triton's interpreter is silently wrong in bfloat16.
@pytest.fixture(params=["float32", "float16", *(["bfloat16"] if HAS_CUDA else [])])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The model's dtype."""
    value = getattr(torch, request.param)
    assert isinstance(value, torch.dtype)
    return value
