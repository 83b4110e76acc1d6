"""Compiles the kernels for a GPU that need not be there; a program of its own, outside Triton's interpreter.

    python -m tests.services.models.kernels.compiling [MODULE ...]

Takes the names of the modules whose kernels it compiles, all by default. The interpreter accepts code that the compiler
does not: types that change in a branch, globals, returns of two types.
"""

from __future__ import annotations

import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from slipstream.services.models.kernels import (
    attention_kernels,
    block_ops,
    filter_kernels,
    products,
    rotation,
    sampling_kernels,
)

HOPPER = GPUTarget("cuda", 90, 32)
NUMBERS = {
    **dict.fromkeys(("num_pages", "table_width", "width", "num_splits", "num_query_blocks", "window"), "i32"),
    **dict.fromkeys(("vocab_size", "num_blocks", "num_rows", "level", "num_tokens", "max_positions"), "i32"),
    **dict.fromkeys(("score_scale", "eps"), "fp32"),
}
POINTERS = {
    **dict.fromkeys(("page_table", "positions", "limits", "starts", "rows", "row_begins", "tile_begins"), "*i64"),
    **dict.fromkeys(("top_ks", "seeds", "token_ids", "tokens"), "*i64"),
    **dict.fromkeys(("counts", "bits", "count_before", "looked_at", "block_index", "block_chosen"), "*i32"),
    **dict.fromkeys(("qkv", "kv", "output", "query_norm", "key_norm", "logits"), "*bf16"),
    **dict.fromkeys(
        ("x", "delta", "weight", "summed", "normed", "gate_up", "bias", "residual", "norm_weight", "scaled"), "*bf16"
    ),
    "is_valid": "*i1",
    "is_done": "*i8",
}
"""The others are float32."""
PROMPT = {"BLOCK_M": 128, "BLOCK_N": 64, "SPARES_MASKS": True, "IS_SPLIT": False, "IS_RAGGED": True}
HEADS = {"PAGE_SIZE": 16, "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "IS_RAGGED": False}
ATTEND = {**HEADS, "BLOCK_M": 32, "BLOCK_N": 128, "HAS_WINDOW": False, "HAS_STARTS": False, "SPARES_MASKS": False}
KEEP = {**HEADS, "Q_HEADS": 32, "BLOCK_HALF": 64, "BLOCK_HEADS": 2}
PRODUCT: dict[str, object] = {
    "SIZE": 4096,
    "COLUMNS": 4096,
    "PARTS": 128,
    "BLOCK_P": 128,
    "STAGES": 3,
    "FETCHED": 512,
    "BLOCK_M": 16,
    "BLOCK_N": 32,
    "BLOCK_K": 256,
    "HAS_BIAS": True,
    "HAS_RESIDUAL": False,
    "IS_SCALED": False,
    "IS_GATED": False,
    "SCALES": False,
}
SAMPLE = {"BLOCK": 4096, "BLOCK_G": 32, "HAS_IDS": False, "HAS_FILTERS": True, "IS_SECOND": False}
KERNELS: tuple[tuple[Any, int, dict[str, object]], ...] = (
    (attention_kernels.attend_kernel, 4, {**ATTEND, **PROMPT}),
    (attention_kernels.attend_kernel, 4, {**ATTEND, "IS_SPLIT": True}),
    (attention_kernels.attend_kernel, 4, {**ATTEND, "IS_SPLIT": True, "HAS_WINDOW": True}),
    (attention_kernels.attend_kernel, 4, {**ATTEND, "IS_SPLIT": True, "HAS_STARTS": True}),
    (attention_kernels.attend_kernel, 4, {**ATTEND, **PROMPT, "HAS_WINDOW": True, "HAS_STARTS": True}),
    (attention_kernels.combine_kernel, 4, {**HEADS, "BLOCK_S": 16}),
    (rotation.rotation_kernel, 4, {"HALF": 64, "BLOCK_H": 64, "BLOCK_T": 4}),
    (rotation.keep_kernel, 1, {**KEEP, "HAS_NORMS": True}),
    (rotation.keep_kernel, 4, {**KEEP, "BLOCK_HEADS": 8, "HAS_NORMS": False, "IS_RAGGED": True}),
    (block_ops.rms_norm_kernel, 8, {"SIZE": 4096, "BLOCK": 4096, "HAS_DELTA": True}),
    (block_ops.swiglu_kernel, 4, {"SIZE": 14336, "BLOCK": 1024}),
    (products.product_kernel, 4, {**PRODUCT, "HAS_RESIDUAL": True, "SCALES": True}),
    (products.product_kernel, 4, {**PRODUCT, "IS_SCALED": True, "IS_GATED": True}),
    (sampling_kernels.greatest_kernel, 8, SAMPLE),
    (filter_kernels.count_kernel, 8, SAMPLE),
    (sampling_kernels.score_kernel, 8, {**SAMPLE, "HAS_FILTERS": False, "HAS_IDS": True}),
    (sampling_kernels.score_kernel, 8, {**SAMPLE, "IS_SECOND": True}),
    (sampling_kernels.mass_kernel, 8, SAMPLE),
    (sampling_kernels.choose_kernel, 1, {**SAMPLE, "HAS_IDS": True}),
    (sampling_kernels.choose_kernel, 1, {**SAMPLE, "IS_SECOND": True}),
    (sampling_kernels.settle_kernel, 16, SAMPLE),
)
"""Each with the warps that it is launched with; what takes longest comes first."""


def main() -> None:
    """Compiles the kernels and prints their names."""
    modules = sys.argv[1:]
    numbers = [n for n, (kernel, _, _) in enumerate(KERNELS) if not modules or _module_of(kernel) in modules]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        for name in processes.map(compile_kernel, numbers):
            print(name, flush=True)


def compile_kernel(number: int) -> str:
    """Compiles one of them; returns its name."""
    warnings.simplefilter("ignore", UserWarning)  # of Triton's own, about the next version's defaults
    kernel, num_warps, constants = KERNELS[number]
    values = {**constants, "OVERLAPS": True}
    names = [parameter.name for parameter in kernel.params]
    types = {name: NUMBERS.get(name, POINTERS.get(name, "*fp32")) for name in names}
    types |= {parameter.name: "constexpr" for parameter in kernel.params if parameter.is_constexpr}
    fixed = {(names.index(name),): values[name] for name in names if types[name] == "constexpr"}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed)
    compile(source, target=HOPPER, options={"num_warps": num_warps, "launch_pdl": True})
    return str(kernel.__name__)


def _module_of(kernel: Any) -> str:
    return str(kernel.__module__).rpartition(".")[2]


if __name__ == "__main__":
    main()
