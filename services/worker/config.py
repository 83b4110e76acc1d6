"""The settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.settings import Settings, setting

STANDALONE = "standalone"
EAGLE3 = "eagle3"
ALGORITHMS = (STANDALONE, EAGLE3)
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
MAX_ACCEPT_LENGTH = 17
"""With as many draft tokens as a step may have."""
DTYPES = ("auto", "bfloat16", "float16", "float32")

_CHECKPOINT: dict[str, Any] = {"accepts": Path.is_dir, "accepted": "a directory with a checkpoint"}
ONLY_DRAFT = ("algorithm", "target")
ONLY_VERIFY = ("simulate_accept_length", "deterministic_width")
"""Settings that the other of both services has no use for, and no option."""


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    """The workers' settings that `slipstream up` has, too, and passes on."""

    device: str = setting("auto", help="What computes.", choices=DEVICES)
    dtype: str = setting(
        "auto",
        help="What is computed in, whatever the checkpoint holds; auto is bfloat16 on a GPU, float32 on a CPU.",
        choices=DTYPES,
    )
    load_format: str = setting(
        "auto", help="Measuring: dummy has random weights, for which config.json is enough.", choices=LOAD_FORMATS
    )
    threads: int | None = setting(
        None,
        help="Compute threads of a worker on a CPU.",
        unit="N",
        low=1,
        high=1024,
        unset="half the cores, since two workers share them",
    )
    simulate_accept_length: float | None = setting(
        None,
        help="Measuring: accept drafts by chance, X tokens a step on average; the output is no text.",
        unit="X",
        low=1,
        high=MAX_ACCEPT_LENGTH,
        accepted=f"1 to {MAX_ACCEPT_LENGTH}, the bonus token included",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ComputeSettings):
    """The settings of a worker. Checked when it is built; the command lines of both take their options from here."""

    model: Path = setting(help="Hugging Face directory of the model.", unit="DIR", **_CHECKPOINT)
    algorithm: str = setting(STANDALONE, help="How drafts are made.", choices=ALGORITHMS)
    target: Path | None = setting(
        None,
        help="The target's directory, for a head without embedding or tokenizer of its own.",
        unit="DIR",
        **_CHECKPOINT,
    )
    # Every decode step then computes all slots, with rows of so many tokens, and prompts are padded: products have one
    # size, and a token is the same in any batch, with any draft of fewer tokens and without one.
    deterministic_width: int | None = setting(
        None,
        help="On a GPU: tokens of a row in every step, at least one more than are drafted; the output then does not "
        "depend on the batch or the draft.",
        unit="N",
        low=1,
        high=MAX_ACCEPT_LENGTH,
    )
    acknowledge_done: bool = setting(
        False, help="Measuring: acknowledge a step when its work is done, not when it is enqueued."
    )
    debug_sync: bool = setting(
        False, help="Debugging: a wait of PyTorch for the GPU while a step is enqueued is an error."
    )
    access_log_dir: Path | None = setting(
        None, help="Debugging: log accesses to shared memory there, for the happens-before checker.", unit="DIR"
    )
