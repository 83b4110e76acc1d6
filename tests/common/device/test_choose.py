"""Which device is chosen, and what is said where a GPU cannot be."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest
import torch

from slipstream.common.device.choose import choose_device, cuda_obstacle
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import ConfigError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As far as PyTorch and the installed packages say, a GPU can be used."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    return monkeypatch


def test_nothing_is_in_the_way(gpu: pytest.MonkeyPatch) -> None:
    assert cuda_obstacle() is None


def test_an_unusable_gpu_is_reported_with_the_remedy(gpu: pytest.MonkeyPatch) -> None:
    def no_parent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    gpu.setattr(importlib.util, "find_spec", no_parent)
    assert cuda_obstacle() == "cuda-bindings is missing; install slipstream-serve[cuda]"
    gpu.setattr(importlib.util, "find_spec", lambda name: None)
    assert cuda_obstacle() == "cuda-bindings is missing; install slipstream-serve[cuda]"
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA_VISIBLE_DEVICES" in str(cuda_obstacle())
    gpu.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(cuda_obstacle())


def test_auto_is_the_cpu_where_a_gpu_cannot_be_used(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(choose_device("auto"), HostDevice)
    assert isinstance(choose_device("cpu"), HostDevice)
    with pytest.raises(ConfigError, match=r"device: got 'cuda', accepted: cpu here: PyTorch finds no GPU"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("device", "fence", "message"),
    [
        ("tpu", "auto", "device: got 'tpu', accepted: auto, cpu, cuda"),
        ("cpu", "host", "fence: got 'host', accepted: auto, timeline, event"),
        ("cpu", "timeline", "fence: got 'timeline', accepted: auto on a CPU"),
        ("cpu", "event", "fence: got 'event', accepted: auto on a CPU"),
    ],
)
def test_a_device_and_a_fence_that_do_not_fit_are_refused(device: str, fence: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_device(device, fence)


def test_a_fence_of_a_gpu_where_there_is_none(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="fence: got 'event', accepted: auto on a CPU: PyTorch finds no GPU"):
        choose_device("auto", "event")
