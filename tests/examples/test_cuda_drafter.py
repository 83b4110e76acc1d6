"""The CUDA drafter without a GPU: its kernels as C++, the driver's calls on threads. `tests/gpu` has the real ones."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
from pathlib import Path

import pytest

from slipstream.bundled import target_dir
from slipstream.cli.check_drafter import run_check_drafter
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.step import Role
from tests.examples.test_numpy_drafter_parts import VECTORS
from tests.gpu.test_cuda_drafter import make_jobs, serve
from tests.harness.emulated_cuda import build
from tests.harness.example_drafters import ExampleDrafted, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the kernels for the CPU"),
]
PROGRAM = str(Path(__file__).parent.parent / "harness" / "emulated_cuda.py")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels."""
    return build(tmp_path_factory.mktemp("kernels"))


def test_noise_is_that_of_the_page(library: Path) -> None:
    noise = ctypes.CDLL(str(library)).noise
    noise.restype, noise.argtypes = ctypes.c_float, (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    found = [struct.pack(">f", noise(*(int(number) for number in vector[:3]))).hex() for vector in VECTORS]
    assert found == [bits for *_, bits in VECTORS]


def test_nothing_of_the_contract_is_broken(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tokenizer", str(target_dir()), "--dtype", "float32")
    with serving(tmp_path, PROGRAM, str(library), *options) as address:
        assert run_check_drafter(address, "cpu", timeout_s=30.0) == 0
    assert re.search("0 broken", capsys.readouterr().out)


@pytest.mark.parametrize("run_ahead", [0, 2])
async def test_the_same_tokens_as_without_a_draft(library: Path, tmp_path: Path, run_ahead: int) -> None:
    program = [PROGRAM, str(library), "--dtype", "float32"]
    with ExampleDrafted(tmp_path, target_dir(), program, "--device", "cpu") as processes:
        processes.start(Role.DRAFT, Role.VERIFY)
        expected = await serve(processes, make_jobs(), HostDevice(), has_draft=False)
        jobs = make_jobs()
        assert await serve(processes, jobs, HostDevice(), run_ahead=run_ahead) == expected
        lengths = [job.stats.mean_accept_length for job in jobs]
        print("accept lengths", lengths)
        assert min(lengths[:2]) > 1.5
        assert processes.end() == [0, 0]
