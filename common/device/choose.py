"""Chooses the device of a process; the only module outside `cuda/` that may import it."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from slipstream.common.device.interface import Device

logger = logging.getLogger(__name__)

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
DEVICES = (AUTO, CPU, CUDA)
FENCES = (AUTO, "timeline", "event")
"""Settings of a GPU's fence; a CPU has one kind."""


def choose_device(device: str, fence: str = AUTO, *, ordinal: int = 0) -> Device:
    """Makes the device; "auto" takes a GPU if one can be used. Raises ConfigError, DeviceError.

    `ordinal`: number of the GPU among those that CUDA_VISIBLE_DEVICES shows.
    """
    if device not in DEVICES:
        raise ConfigError("device", device, ", ".join(DEVICES))
    if fence not in FENCES:
        raise ConfigError("fence", fence, ", ".join(FENCES))
    obstacle = None if device == CPU else cuda_obstacle()
    if device == CUDA and obstacle is not None:
        raise ConfigError("device", device, f"cpu here: {obstacle}")
    if device == CPU or obstacle is not None:
        if fence != AUTO:
            raise ConfigError("fence", fence, f"{AUTO} on a CPU" + (f": {obstacle}" if obstacle else ""))
        if obstacle is not None:
            logger.info("on the CPU: %s", obstacle)
        return HostDevice()
    if ordinal >= torch.cuda.device_count():
        raise ConfigError("device", f"cuda:{ordinal}", f"one of the GPUs that are visible, {torch.cuda.device_count()}")
    from slipstream.common.device.cuda.device import CudaDevice

    try:
        return CudaDevice(fence, ordinal)
    except (ImportError, OSError) as error:
        raise DeviceError(f"cuda-bindings does not fit this driver or PyTorch: {error}") from error


def cuda_obstacle() -> str | None:
    """Returns why a GPU cannot be used here, with the remedy; None if it can."""
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA; install a build for your driver"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU; see whether nvidia-smi does, and whether CUDA_VISIBLE_DEVICES hides it"
    if not _has_bindings():
        return "cuda-bindings is missing; install slipstream-serve[cuda]"
    return None


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False
