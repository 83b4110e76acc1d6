"""The CUDA drafter on a CPU: emulated_cuda.py LIBRARY --tokenizer DIR --listen unix:PATH.

Its kernels are compiled as C++ (`build`); the driver's calls are those of `cuda.bindings`, on threads and mapped files.
"""

# ruff: noqa: N802, N815 - the driver's names

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cuda_drafter"
KERNELS = (b"stamp", b"take_over", b"put", b"propose")
_FUTEX, _FUTEX_WAKE, _ALL = 202, 1, 2**31 - 1
_system = ctypes.CDLL(None)


def build(folder: Path) -> Path:
    """Compiles the kernels for this CPU, and returns the library."""
    source = (FOLDER / "kernels.cu").read_text(encoding="utf-8")
    for gpu, cpu in (
        ("THREADS = 256;", "THREADS = 2;"),
        ('asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));', "now = global_timer();"),
    ):
        assert source.count(gpu) == 1
        source = source.replace(gpu, cpu)
    (folder / "kernels.inc").write_text(source, encoding="utf-8")
    library = folder / "kernels.so"
    options = ("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{folder}", "-o", str(library))
    subprocess.run(("g++", *options, str(Path(__file__).with_suffix(".cpp"))), check=True)
    return library


class Result(enum.IntEnum):
    """`CUresult`."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_READY = 600


class Stream:
    """A thread that does one piece of work after the other."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_enqueued = self._num_done = 0
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """True if all is done."""
        return self._num_done == self._num_enqueued

    def enqueue(self, work: Callable[[], None]) -> tuple[Result]:
        """Appends work."""
        self._num_enqueued += 1
        self._work.put(work)
        return (Result.CUDA_SUCCESS,)

    def _run(self) -> None:
        while True:
            self._work.get()()
            self._num_done += 1


class Driver(ModuleType):
    """The module `cuda.bindings.driver`, as far as the drafter uses it; other calls succeed and do nothing."""

    CUresult = Result
    CUstream_flags = CUipcMem_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=1, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=2
    )
    CUipcMemHandle = SimpleNamespace

    def __init__(self, library: str) -> None:
        super().__init__("cuda.bindings.driver")
        self._kernels = ctypes.CDLL(library)
        self._kernels.launch.restype = ctypes.c_void_p
        self._kernels.execute.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._streams = [Stream()]
        self._memory: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """A function that need do nothing."""
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*_: object) -> tuple[Result, int]:
            return Result.CUDA_SUCCESS, 0

        function.__name__ = name
        return function

    def cuDeviceGetUuid(self, _: int) -> tuple[Result, Any]:
        return Result.CUDA_SUCCESS, SimpleNamespace(bytes=bytes(16))

    def cuModuleGetFunction(self, _: int, name: bytes) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, KERNELS.index(name)

    def cuStreamCreate(self, _: int) -> tuple[Result, int]:
        self._streams.append(Stream())
        return Result.CUDA_SUCCESS, len(self._streams) - 1

    def cuStreamQuery(self, stream: int) -> tuple[Result]:
        return (Result.CUDA_SUCCESS if self._streams[stream].is_idle else Result.CUDA_ERROR_NOT_READY,)

    def cuStreamSynchronize(self, stream: int) -> tuple[Result]:
        while not self._streams[stream].is_idle:
            time.sleep(0.001)
        return (Result.CUDA_SUCCESS,)

    def cuLaunchKernel(self, kernel: int, blocks: int, *rest: int) -> tuple[Result]:
        *_, stream, arguments, _ = rest
        launch = self._kernels.launch(kernel, ctypes.c_void_p(arguments))
        return self._streams[stream].enqueue(lambda: self._kernels.execute(launch, blocks))

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, _: int) -> tuple[Result]:
        word = ctypes.c_int64.from_address(address)

        def wait() -> None:
            while word.value < value:
                time.sleep(0.0005)

        return self._streams[stream].enqueue(wait)

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, _: int) -> tuple[Result]:
        def write() -> None:
            ctypes.c_uint64.from_address(address).value = value
            _system.syscall(_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, _ALL, None, None, 0)

        return self._streams[stream].enqueue(write)

    def cuMemAlloc(self, size: int) -> tuple[Result, int]:
        return self._keep(ctypes.create_string_buffer(size))

    def cuIpcOpenMemHandle(self, handle: Any, _: int) -> tuple[Result, int] | tuple[Result]:
        """The handle is the path of a file."""
        try:
            with open(handle.reserved.rstrip(b"\0"), "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except OSError:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        return self._keep((ctypes.c_char * len(memory)).from_buffer(memory))

    def cuMemGetAddressRange(self, address: int) -> tuple[Result, int, int]:
        return Result.CUDA_SUCCESS, address, len(self._memory[address])

    def cuMemFree(self, address: int) -> tuple[Result]:
        del self._memory[address]
        return (Result.CUDA_SUCCESS,)

    cuIpcCloseMemHandle = cuMemFree

    def _keep(self, memory: Any) -> tuple[Result, int]:
        address = ctypes.addressof(memory)
        self._memory[address] = memory
        return Result.CUDA_SUCCESS, address


def emulated(request: Any) -> Any:
    """An attachment to memory of a CPU, as if it were a GPU's."""
    for manifest in (request.manifest, request.given):
        if manifest.kind == "file":
            manifest.kind, manifest.handle = "cuda_ipc", manifest.path.encode().ljust(64, b"\0")
        for word in manifest.fences:
            word.kind = word.kind.replace("host", "timeline")
    return request


def main() -> int:
    """Serves as the drafter does."""
    driver, nvrtc = Driver(sys.argv.pop(1)), ModuleType("cuda.bindings.nvrtc")
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver, bindings.nvrtc = driver, nvrtc
    sys.modules |= {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, driver.__name__: driver}
    sys.path.insert(0, str(FOLDER))
    gpu: Any = __import__("gpu")
    gpu.compiled = lambda _: b""
    drafter: Any = __import__("main")
    make_gpu, make_epoch = drafter.Gpu, drafter.GpuEpoch

    def make_named() -> Any:
        made = make_gpu()
        made.identity = "cpu"
        return made

    drafter.Gpu = make_named
    drafter.GpuEpoch = lambda request, *rest: make_epoch(emulated(request), *rest)
    status: int = drafter.main()
    return status


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
