"""Checks of the GPU's side: driver, CUDA, the GPU itself."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.doctor.finding import failed, note, ok
from slipstream.cli.up.mps import has_nvidia_device

if TYPE_CHECKING:
    from slipstream.cli.doctor.finding import Finding

_DRIVER = Path("/proc/driver/nvidia/version")
_WITHOUT = "none needed with --device cpu; for a GPU, install NVIDIA's driver (in containers, its container toolkit)"


def check_driver(*, is_needed: bool) -> Finding:
    """NVIDIA's kernel driver and its library."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        where = "a GPU, but no libcuda.so.1" if has_nvidia_device() else "no GPU and no driver here"
        return failed("driver", where, _WITHOUT) if is_needed else note("driver", where, _WITHOUT)
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return failed("driver", "libcuda.so.1 does not answer", "install the driver again, and restart the host")
    found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.exists() else None
    kernel = found[0] if found else "of unknown version"
    return ok("driver", f"{kernel}, for CUDA up to {version.value // 1000}.{version.value % 1000 // 10}")


def check_cuda(*, is_needed: bool) -> Finding:
    """PyTorch's CUDA and the bindings."""
    import torch

    from slipstream.common.device.choose import cuda_obstacle

    obstacle = cuda_obstacle()
    detail = f"PyTorch {torch.__version__}"
    if obstacle is None:
        return ok("CUDA", f"{detail}, CUDA {torch.version.cuda}, cuda-bindings")
    return failed("CUDA", detail, obstacle) if is_needed else note("CUDA", f"{detail}: on the CPU", obstacle)


def check_gpu() -> Finding:
    """The first one that is shown to this process."""
    import torch

    gpu = torch.cuda.get_device_properties(0)
    free, total = (size >> 30 for size in torch.cuda.mem_get_info(0))
    detail = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {free} of {total} GiB free"
    if gpu.major < 8:
        return note("GPU", detail, "bfloat16 needs 8.0: start with --dtype float16 or float32")
    if free * 10 < total:
        return note("GPU", detail, "end who else uses it, or see that the models fit")
    return ok("GPU", detail)
