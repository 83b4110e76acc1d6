"""Launches of a Triton kernel on the CPU, as a GPU would have to compile for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class KernelLaunches:
    """Stands in a kernel's place, and notes what it is compiled for: constants, and the dtypes of what it is given."""

    def __init__(self, kernel: Any = None) -> None:
        """`kernel`: is launched, in Triton's interpreter, which has no clock for stamps; None launches nothing."""
        self._kernel = kernel
        self.variants: set[tuple[object, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            dtypes = (argument.dtype for argument in arguments if isinstance(argument, torch.Tensor))
            self.variants.add((*dtypes, *constants.items()))
            if "HAS_STAMP" in constants:
                constants["HAS_STAMP"] = False
            if self._kernel is not None:
                self._kernel[grid](*arguments, **constants)

        return launch
