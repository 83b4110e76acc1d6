"""Weights that have no room: one line with what they take, from a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from slipstream.benchmarks.models import SHAPES
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import OutOfMemoryError
from slipstream.common.host import host_bytes
from slipstream.services import factory
from slipstream.services.models.config import ModelConfig
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.head_config import HEADS
from slipstream.services.models.heads import make_head
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.graphs import forward_size
from slipstream.services.worker.memory import WORK_BYTES, is_out_of_memory, needed_for_work
from tests.harness.checkpoints import write_checkpoint, write_json
from tests.harness.eagle3_checkpoints import ALGORITHMS, AUTHORS, BLOCKS, write_head

if TYPE_CHECKING:
    from slipstream.common.device.interface import Device


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("service", ["verify", "draft"])
def test_weights_that_do_not_fit_are_one_line(service: str, model: Path) -> None:
    command = (sys.executable, "-m", f"slipstream.services.{service}_main", "--model", str(model))
    options = ("--listen", f"unix:{model.parent}/{service}.sock", "--load-format", "dummy", "--device", "cpu")
    found = subprocess.run((*command, *options), capture_output=True, text=True, timeout=60, check=False)
    config = json.loads((model / "config.json").read_text())
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

    monkeypatch.setattr(factory, "load_head", fail)
    target = write_checkpoint(tmp_path / "target")
    head = write_head(tmp_path / "head")
    config = WorkerConfig(model=head, algorithm="eagle3", target=target, device="cpu")
    with pytest.raises(OutOfMemoryError, match=r"the weights of head take \d+ MiB"):
        factory.make_draft(config, HostDevice(), 0)


@pytest.mark.parametrize(("capability", "gigabytes"), [((9, 0), 65.3), ((8, 0), 233.7)])
def test_weights_count_as_a_gpu_keeps_them(
    capability: tuple[int, int], gigabytes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(factory, "load_decoder", fail)
    monkeypatch.setattr(factory, "_models_on", lambda _: (Decoder, make_head))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**35))
    write_json(tmp_path / "config.json", SHAPES["gpt-oss-120b"])
    gpu = cast("Device", SimpleNamespace(torch_device=torch.device("cuda")))
    with pytest.raises(OutOfMemoryError, match=r"take \d+ MiB, and 1024 MiB of the GPU's 32768 MiB are free") as caught:
        factory._load(WorkerConfig(model=tmp_path), gpu)
    mib = int(str(caught.value).partition(" MiB")[0].rpartition(" ")[2])
    assert mib * 2**20 / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_shared_weights_without_room_name_their_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OutOfMemoryError("/dev/shm has no room for 9 MiB of shared memory")

    monkeypatch.setattr(HostDevice, "create_arena", fail)
    config = WorkerConfig(model=write_checkpoint(tmp_path / "target"), device="cpu", share_weights=True)
    with pytest.raises(OutOfMemoryError, match=r"no room for 9 MiB of shared memory; share_weights puts"):
        factory.make_verify(config, HostDevice(), 0)


@pytest.mark.parametrize(("layout", "num_forwards"), [(AUTHORS, 1), (BLOCKS, 2)])
def test_a_head_counts_the_states_that_it_reads(tmp_path: Path, layout: str, num_forwards: int) -> None:
    """And a block drafter its blocks, which come beside the step's tokens."""
    target = write_checkpoint(tmp_path / "target")
    head, algorithm = write_head(tmp_path / "head", layout=layout), ALGORITHMS[layout]
    found = factory.describe_draft(WorkerConfig(model=head, algorithm=algorithm, target=target), HostDevice(), 0)
    without = needed_for_work(HEADS[algorithm].config(head).layer, torch.float32)
    assert found.memory.work_per_token - num_forwards * without.work_per_token == 2 * 4 * found.hidden_width > 0
    assert found.memory.work_per_choice - without.work_per_choice == 2 * 4 * found.hidden_width


def test_other_errors_are_not_about_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("no room"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize("num_tokens", [1, 17, 513, 1793, 2049, 4097, 9000, 65537])
def test_the_padding_of_forwards_is_counted(num_tokens: int, model: Path) -> None:
    config = ModelConfig.from_directory(model)
    needed = needed_for_work(config, torch.bfloat16)
    activations = 4 * config.hidden_size + 2 * (config.q_size + 2 * config.kv_size) + 3 * config.intermediate_size
    counted = needed.work - WORK_BYTES + num_tokens * (needed.work_per_token + needed.work_per_choice)
    padding = forward_size(num_tokens) - num_tokens
    logits = num_tokens * needed.work_per_choice + 2 * padding * config.vocab_size
    assert counted >= 2 * forward_size(num_tokens) * activations + logits
