"""A plugin of pytest: kernels that tests launch are compiled for a Hopper GPU, which need not be there, and not run.

    python -m pytest -p tests.services.models.kernels.compiling tests/services/models/kernels/test_step_ops.py

The interpreter accepts code that the compiler does not: types that change in a branch, globals, returns of two types.
Kernels write nothing here, and tests find zeros, so that they go wrong; what counts is printed at the end: the kernels
that were compiled, each once for each set of flags, and the first error of each that could not be. A loop with products
of numbers in registers that never waits for all of them fails, too: the next step's numbers may replace those that the
tensor cores still read. Belongs into a process of its own, as Triton decides between the two when it is imported.
"""

from __future__ import annotations

import os
import pkgutil
import re
import traceback
from importlib import import_module
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton 3.9 has it without a setting, but for a warning

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from slipstream.services.models import kernels

COMPILED, FAILED = "compiled", "cannot compile"
FULL_HEAD_DIM = 128
SHARED_BYTES = 227 * 1024
"""Of a Hopper GPU's multiprocessor, for one program; a kernel that takes more fails when it is launched."""


class HopperDriver:
    """A driver of Triton's without a GPU behind it."""

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """There is one device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """There is one stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The device of the tensors."""
        return torch.device("cpu")


LOOP = re.compile(r"^(?P<indent> *)[^ \n].*scf\.for .*\n(?=(?P<step>(?:(?P=indent)  .*\n)*))", re.MULTILINE)
PRODUCT_OF_REGISTERS = re.compile(r"warp_group_dot [^\n]*: tensor<")
AWAITED = re.compile(r"warp_group_dot_wait [^\n]*pendings = 0")
SINGLE = ("K_BLOCKS", "GROUPS")
"""Flags with the number of scales along a row; kernels are compiled for 1 and for more."""

_failures: dict[str, str] = {}
_compiled: set[tuple[object, ...]] = set()
_run = JITFunction.run


def _compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    flags = (name for name, value in options.items() if value is True)
    # Heads of that size have the tiles that models run with.
    has_full_heads = options.get("HEAD_DIM") == FULL_HEAD_DIM
    dtypes = (arg.dtype for arg in args if isinstance(arg, torch.Tensor))
    is_single = (options.get(name, 0) == 1 for name in SINGLE)
    key = self.fn.__name__, has_full_heads, *is_single, *sorted(flags), *dtypes
    if key in _compiled:
        return None
    _compiled.add(key)
    if "OVERLAPS" in options:
        options |= {"OVERLAPS": True, "launch_pdl": True}
    try:
        kernel = _run(self, *args, grid=grid, warmup=True, **options)
        if kernel.metadata.shared > SHARED_BYTES:
            raise MemoryError(f"{kernel.metadata.shared} bytes of shared memory, of which there are {SHARED_BYTES}")
        if any(_has_unawaited(found["step"]) for found in LOOP.finditer(kernel.asm["ttgir"])):
            raise AssertionError("a loop does not wait for its products of numbers in registers")
        return kernel
    except Exception as error:
        _failures.setdefault(self.fn.__name__, "".join(traceback.format_exception(error)[-3:]))
        raise


def _has_unawaited(step: str) -> bool:
    """True if a loop always goes on to its next step while a product of registers may be under way."""
    return PRODUCT_OF_REGISTERS.search(step) is not None and AWAITED.search(step) is None


for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
    import_module(module.name)  # before the tests' settings choose the interpreter
import_module("slipstream.services.draft.fused_suffix_cache")
# No test takes numbers that happen to be in memory for sizes.
torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
triton.runtime.driver.set_active(HopperDriver())
JITFunction.run = _compile


def pytest_sessionfinish() -> None:
    """Prints the names."""
    print()
    for name in sorted({str(key[0]) for key in _compiled} - _failures.keys()):
        print(f"{COMPILED} {name}")
    for name, failure in _failures.items():
        print(f"{FAILED} {name}\n{failure}")
