"""The settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - read at run time by the command line

from slipstream.common.errors import ConfigError

STANDALONE = "standalone"
EAGLE3 = "eagle3"
ALGORITHMS = (STANDALONE, EAGLE3)
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
MAX_ACCEPT_LENGTH = 17
"""With as many draft tokens as a step may have."""
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Checked when it is built; the command lines of draft and verify take their defaults from here."""

    model: Path
    """A Hugging Face directory."""
    algorithm: str = STANDALONE
    """How a draft works; verify has no use for it."""
    target: Path | None = None
    """Directory of the target model, for what a draft head leaves to it: the embedding, the tokenizer."""
    device: str = "auto"
    """What to compute on: "auto", "cpu" or "cuda"."""
    dtype: str = "auto"
    """What to compute in, whatever the checkpoint holds; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    load_format: str = "auto"
    """Where weights come from: the checkpoint ("auto"), or nowhere ("dummy": random, for measurements)."""
    simulate_accept_length: float | None = None
    """Accept draft tokens by chance, so that steps yield this many tokens on average: for measurements only."""
    deterministic_width: int | None = None
    """Verify on a GPU: every decode step computes all slots, with rows of so many tokens, and prompts are padded.

    Then products have one size, and a token is the same in any batch, with any draft of fewer tokens and without one.
    """
    threads: int | None = None
    """Compute threads on a CPU; None is half the cores, since two workers share them."""
    acknowledge_done: bool = False
    """Acknowledge a step when its work is done instead of when it is enqueued: a policy to measure against."""
    debug_sync: bool = False
    """A wait of PyTorch's for the GPU while a step is enqueued is an error."""
    access_log_dir: Path | None = None
    """Log every access to shared memory there, for the happens-before checker."""

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field."""
        if not self.model.is_dir():
            raise ConfigError("model", str(self.model), "a directory with a checkpoint")
        if self.target is not None and not self.target.is_dir():
            raise ConfigError("target", str(self.target), "a directory with a checkpoint")
        if self.algorithm not in ALGORITHMS:
            raise ConfigError("algorithm", self.algorithm, ", ".join(ALGORITHMS))
        if self.device not in DEVICES:
            raise ConfigError("device", self.device, ", ".join(DEVICES))
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, ", ".join(DTYPES))
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError("load_format", self.load_format, ", ".join(LOAD_FORMATS))
        if self.simulate_accept_length is not None and not 1 <= self.simulate_accept_length <= MAX_ACCEPT_LENGTH:
            accepted = f"1 to {MAX_ACCEPT_LENGTH}, the bonus token included"
            raise ConfigError("simulate_accept_length", self.simulate_accept_length, accepted)
        if self.deterministic_width is not None and not 1 <= self.deterministic_width <= MAX_ACCEPT_LENGTH:
            raise ConfigError("deterministic_width", self.deterministic_width, f"1 to {MAX_ACCEPT_LENGTH}")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ConfigError("threads", self.threads, "1 to 1024")
