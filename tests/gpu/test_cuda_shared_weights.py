"""Weights that verify lends on a GPU: a draft reads them where they are, and may still do so when verify has died."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.common.device.choose import choose_device
from tests.harness.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

_LENDER = """
import pickle, sys, time
from pathlib import Path
import torch
from slipstream.common.device.choose import choose_device
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.factory import make_verify
role = make_verify(WorkerConfig(model=Path(sys.argv[1]), share_weights=True, dtype="float32"), choose_device("cuda"), 0)
torch.cuda.synchronize()
print(pickle.dumps(role.description.weights).hex(), flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(120)
def test_lent_weights_outlive_a_verify_that_was_killed(tmp_path: Path) -> None:
    """A draft's kernels under way read no memory that was given to another process meanwhile."""
    from safetensors.torch import load_file

    target, device = write_checkpoint(tmp_path / "target"), choose_device("cuda")
    with subprocess.Popen((sys.executable, "-c", _LENDER, str(target)), stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdout is not None
        arena = device.open_arena(pickle.loads(bytes.fromhex(lender.stdout.readline())), read_only=True)
        lender.send_signal(signal.SIGKILL)
        lender.wait()
    others = [torch.full((2**22,), 7.0, device="cuda") for _ in range(64)]  # 1 GiB: freed memory would be taken
    torch.cuda.synchronize()
    for name, theirs in (("embedding", "model.embed_tokens.weight"), ("output", "lm_head.weight")):
        assert torch.equal(arena.tensor(name).cpu(), load_file(target / "model.safetensors")[theirs].float())
    assert len(others) == 64
    arena.close()
