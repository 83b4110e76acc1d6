"""Weights that have no room: one line with what they take, from a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import OutOfMemoryError
from slipstream.services.worker import factory
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.memory import host_bytes, is_out_of_memory
from tests.harness.checkpoints import write_checkpoint
from tests.harness.eagle3_checkpoints import write_head

if TYPE_CHECKING:
    from pathlib import Path


SERVICES = ("verify", "draft")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that no machine holds, with random weights, so that no file of its size is needed."""
    model = write_checkpoint(tmp_path_factory.mktemp("models") / "model")
    config = json.loads((model / "config.json").read_text()) | {
        "intermediate_size": 2**20,
        "hidden_size": 2**17,
        "num_hidden_layers": 1024,
    }
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def ended(model: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """The services that try to load it, side by side."""

    def run(service: str) -> subprocess.CompletedProcess[str]:
        listen = f"unix:{model.parent}/{service}.sock"
        command = (sys.executable, "-m", f"slipstream.services.{service}.main", "--model", str(model))
        options = ("--listen", listen, "--load-format", "dummy", "--device", "cpu")
        return subprocess.run((*command, *options), capture_output=True, text=True, timeout=60, check=False)

    with ThreadPoolExecutor(len(SERVICES)) as threads:
        return dict(zip(SERVICES, threads.map(run, SERVICES), strict=True))


@pytest.mark.parametrize("service", SERVICES)
def test_weights_that_do_not_fit_are_one_line(
    service: str, model: Path, ended: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    found, config = ended[service], json.loads((model / "config.json").read_text())
    assert found.returncode == 1
    line = found.stderr.strip().splitlines()[-1]
    layer_mib = 3 * config["intermediate_size"] * config["hidden_size"] * 4 // 2**20
    number = int(line.split(" MiB")[0].rsplit(maxsplit=1)[1])
    assert line.startswith(f"slipstream-{service}: the weights of model take ")
    assert f"and the host has {host_bytes() / 2**20:.0f} MiB: end who else uses it, or take a smaller" in line
    assert layer_mib * config["num_hidden_layers"] <= number < 1.01 * layer_mib * config["num_hidden_layers"]
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"])
def test_a_head_says_its_own_size(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(factory, "load_eagle3", fail)
    target = write_checkpoint(tmp_path / "target")
    head = write_head(tmp_path / "head")
    config = WorkerConfig(model=head, algorithm="eagle3", target=target, device="cpu")
    with pytest.raises(OutOfMemoryError, match=r"the weights of head take \d+ MiB"):
        factory.make_draft(config, HostDevice(), 0)


def test_other_errors_are_not_about_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("no room"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
