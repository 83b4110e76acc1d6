"""CUDA's driver as `cuda.bindings` has it, without a GPU: a call succeeds, unless it is told to answer otherwise."""

from __future__ import annotations

import ctypes
import enum
import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PREFIX = "slipstream.common.device"
MODULES = (
    "cuda.driver",
    "cuda.stream",
    "cuda.arena",
    "cuda.fences",
    "cuda.device",
)


class Result(enum.IntEnum):
    """`CUresult`, as far as it is used."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801


class Flags:
    """Any flag."""

    def __getattr__(self, name: str) -> int:
        """They are told apart by nobody here."""
        return 1


class FakeCuda(ModuleType):
    """The module `cuda.bindings.driver`. A call gives a new number where it gives something."""

    CUresult = Result
    CUstream_flags = CUevent_flags = CUipcMem_flags = Flags()
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CUipcMemHandle = CUipcEventHandle = SimpleNamespace
    CUstreamWaitValue_flags = CUstreamWriteValue_flags = CUdevice_attribute = Flags()

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.answers: dict[str, tuple[Any, ...]] = {
            "cuMemGetInfo": (Result.CUDA_SUCCESS, 3 << 20, 8 << 20),
            "cuMemGetAddressRange": (Result.CUDA_SUCCESS, 0, 0),
            "cuGetErrorString": (Result.CUDA_SUCCESS, b"as it was told"),
            "cuIpcGetMemHandle": (Result.CUDA_SUCCESS, SimpleNamespace(reserved=bytes(64))),
            "cuIpcGetEventHandle": (Result.CUDA_SUCCESS, SimpleNamespace(reserved=bytes(64))),
        }
        """The return values, by function name."""
        self.calls: list[str] = []
        """The names of the called functions, in order."""
        self._numbers = itertools.count(1 << 21, 1 << 21)

    def fail(self, name: str, result: Result) -> None:
        """The function answers with this error from now on."""
        self.answers[name] = (result,)

    def __getattr__(self, name: str) -> Any:
        """A function of the driver."""
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments: object) -> tuple[Any, ...]:
            self.calls.append(name)
            return self.answers.get(name) or (Result.CUDA_SUCCESS, next(self._numbers))

        function.__name__ = name
        return function


class FakeLibrary:
    """The driver's library, as `ctypes` has it: functions give a status, the same as the module's."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def __getattr__(self, name: str) -> Any:
        """A function, by its name with a version."""

        def function(*arguments: object) -> int:
            return int(getattr(self._cuda, name.removesuffix("_v2"))(*arguments)[0])

        return function


@contextmanager
def installed() -> Iterator[FakeCuda]:
    """In place of the real one, which the modules that use it forget again."""
    fake = FakeCuda()
    packages = {"cuda": ModuleType("cuda"), "cuda.bindings": SimpleNamespace(driver=fake), fake.__name__: fake}
    names = [*packages, *(f"{PREFIX}.{module}" for module in MODULES)]
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.modules.update(packages)  # type: ignore[arg-type]
    driver: Any = importlib.import_module(f"{PREFIX}.cuda.driver")
    driver.ctypes = SimpleNamespace(**vars(ctypes) | {"PyDLL": lambda _: FakeLibrary(fake)})
    try:
        yield fake
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def module(name: str) -> Any:
    """One of `MODULES`, which uses the fake."""
    return importlib.import_module(f"{PREFIX}.{name}")


def driver() -> Any:
    """A `CudaDriver`. PyTorch, which makes its context, has no GPU here."""
    made = module("cuda.driver")
    made.torch = SimpleNamespace(zeros=lambda *_, **__: None, device=torch.device)
    return made.CudaDriver(0)
