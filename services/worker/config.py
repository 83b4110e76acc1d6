"""The settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import ConfigError
from slipstream.common.settings import Settings, setting
from slipstream.services.models.head_config import DFLASH, EAGLE, EAGLE3, MTP

if TYPE_CHECKING:
    from collections.abc import Mapping

STANDALONE = "standalone"
NGRAM = "ngram"
ALGORITHMS = (STANDALONE, EAGLE3, EAGLE, MTP, DFLASH, NGRAM)
DEVICES = ("auto", "cpu", "cuda")
DUMMY = "dummy"
LOAD_FORMATS = ("auto", DUMMY)
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
MAX_ACCEPT_LENGTH = 17
"""With as many draft tokens as a step may have."""
DTYPES = ("auto", "bfloat16", "float16", "float32")
FP8_KV = "fp8"

_CHECKPOINT: dict[str, Any] = {"accepts": Path.is_dir, "accepted": "a directory with a checkpoint"}
_LOOKUP_TOKENS = 5
"""Tokens of a match, if neither bound is given: as in vLLM."""
_MAX_SUFFIX_CACHE_TOKENS = 2**22
PROMPT_LOOKUP: Mapping[str, int | None] = MappingProxyType(
    {"prompt_lookup_min": None, "prompt_lookup_max": None, "suffix_cache_tokens": 0}
)
"""The settings that only algorithm ngram has, and their values with any other."""
ONLY_DRAFT = ("algorithm", "target", *PROMPT_LOOKUP)
ONLY_VERIFY = (
    "simulate_accept_length",
    "simulate_accept_by_position",
    "deterministic_width",
    "tensor_parallel_size",
)
"""Settings that the other of both services has no use for, and no option."""


class Shares(tuple[float, ...]):
    """Numbers of an option, separated by commas."""

    @classmethod
    def parse(cls, given: str | Shares) -> Shares:
        """Reads them. Raises ValueError."""
        return given if isinstance(given, Shares) else cls(float(word) for word in given.split(","))

    def __str__(self) -> str:
        return ",".join(f"{share:g}" for share in self)


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings, heading="Computing"):
    """The workers' settings that `slipstream up` has, too, and passes on."""

    device: str = setting("auto", help="What computes.", choices=DEVICES)
    dtype: str = setting(
        "auto",
        help="What is computed in, whatever the checkpoint holds; auto is bfloat16 on a GPU, float32 on a CPU.",
        choices=DTYPES,
    )
    kv_dtype: str = setting(
        "auto",
        help="How target and draft keep keys and values; auto is in dtype, fp8 takes half of bfloat16's memory.",
        choices=("auto", FP8_KV),
    )
    tensor_parallel_size: int = setting(
        1,
        help="Devices that the target lies on, with a process for each; its heads and widths are divided among them.",
        unit="N",
        accepts=TENSOR_PARALLEL_SIZES.__contains__,
        accepted=", ".join(map(str, TENSOR_PARALLEL_SIZES)),
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
    simulate_accept_by_position: Shares | None = setting(
        None,
        help="Measuring: the same by the share of each position's draft tokens that are accepted after those before "
        "them; the last one is that of all further positions.",
        unit="X,X,...",
        parse=Shares.parse,
        accepts=lambda shares: shares and all(0 <= share <= 1 for share in shares),
        accepted="numbers from 0 to 1, separated by commas",
    )
    prompt_lookup_min: int | None = setting(
        None,
        help="Algorithm ngram: tokens at the end of a sequence that must have stood in it before, at least.",
        unit="N",
        low=1,
        high=64,
        unset=f"prompt-lookup-max, or {_LOOKUP_TOKENS}",
    )
    prompt_lookup_max: int | None = setting(
        None,
        help="Algorithm ngram: tokens that are compared at most; the longest match counts.",
        unit="N",
        low=1,
        high=64,
        unset=f"prompt-lookup-min, or {_LOOKUP_TOKENS}",
    )
    suffix_cache_tokens: int = setting(
        0,
        help="Algorithm ngram: tokens of recent outputs, of all requests without a cache_salt, that are searched, too.",
        unit="N",
        low=0,
        high=_MAX_SUFFIX_CACHE_TOKENS,
    )
    share_weights: bool = setting(
        False,
        help="Verify lends embedding and output to heads that have none of their own, which saves memory. On a GPU the "
        "draft could then change the target's weights: for drafts that you trust.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.simulate_accept_length is not None and self.simulate_accept_by_position is not None:
            accepted = "none with --simulate-accept-length"
            raise ConfigError("simulate_accept_by_position", str(self.simulate_accept_by_position), accepted)
        shortest, longest = self.prompt_lookup
        if shortest > longest:
            raise ConfigError("prompt_lookup_min", shortest, f"at most prompt_lookup_max, {longest}")
        if self.share_weights and self.tensor_parallel_size > 1:
            raise ConfigError("share_weights", True, "off with tensor_parallel_size above 1, which splits them")

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """The fewest and the most tokens of a match of algorithm ngram. One that is not given follows the other."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        return shortest or longest or _LOOKUP_TOKENS, longest or shortest or _LOOKUP_TOKENS


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ComputeSettings, heading="Model"):
    """The settings of a worker. Checked when it is built; the command lines of both take their options from here."""

    model: Path | None = setting(
        None,
        help="Hugging Face directory of the model.",
        unit="DIR",
        unset="none, only for algorithm ngram",
        **_CHECKPOINT,
    )
    algorithm: str = setting(STANDALONE, help="How drafts are made.", choices=ALGORITHMS)
    target: Path | None = setting(
        None,
        help="The target's directory: for algorithm ngram, and a head without embedding or tokenizer of its own.",
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm == NGRAM:
            if self.model is not None:
                raise ConfigError("model", str(self.model), "none with algorithm ngram, which has no model")
            if self.target is None:
                raise ConfigError("target", None, "the target's directory, for its tokenizer and vocabulary")
            return
        if self.model is None:
            raise ConfigError("model", None, _CHECKPOINT["accepted"])
        for name, without in PROMPT_LOOKUP.items():
            if (given := getattr(self, name)) != without:
                raise ConfigError(name, given, "only with algorithm ngram")

    @property
    def directory(self) -> Path:
        """The directory of the model; of the target, where what drafts has none."""
        found = self.model or self.target
        assert found is not None, "checked with the settings"
        return found.resolve()
