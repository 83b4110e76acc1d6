"""The kernels run on the GPU where there is one, and in Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the kernels' tests as tests of the GPU where there is one."""
    here = Path(__file__).parent
    for item in items:
        if HAS_CUDA and here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Leaves out work of Triton's interpreter that changes no result, half of its time.

    It replaces the language's functions again in each call of a device function, computes sums a second time for
    assertions that only a debug build makes, and lists all dtypes whenever it needs the one of numpy.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not isinstance(tl.standard.cdiv, interpreter.InterpretedFunction):
        yield
        return
    builder, dtype_of = interpreter.interpreter_builder, interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def numpy_dtype(kind: Any) -> Any:
        if kind.scalar.is_ptr():
            return dtype_of(kind.scalar)
        if kind.scalar not in known:
            known[kind.scalar] = dtype_of(kind.scalar)
        return known[kind.scalar]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        scope = interpreter._patch_lang(tl.standard.cdiv.fn)  # of the language's own functions, which need it once
        yield
        scope.restore()


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
