"""Settings of all tests."""

from __future__ import annotations

import os

import hypothesis
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: then its kernels run on the CPU, by its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes depends on what else the machine does; pytest bounds the whole test.
hypothesis.settings.register_profile("tests", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tests")
