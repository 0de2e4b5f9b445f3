"""The one place through which every kernel is launched, and what the interpreter needs to be told.

``TRITON_INTERPRET=1``, set before this package is imported, runs the kernels on CPU tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch(
    kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """Run ``kernel`` on a grid of programs; an empty grid runs nothing."""
    if all(grid):
        start(kernel, tuple(grid), args, constants, {"num_warps": num_warps, "num_stages": num_stages})


def start(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, int]
) -> None:
    """What `launch` does; tests put something else in its place."""
    kernel[grid](*args, **constants, **options)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """The type to which a kernel brings both operands of ``tl.dot``: that of the tensors.

    The interpreter's product of bfloat16 is wrong without a word, so there it is float32.
    """
    return tl.float32 if INTERPRETED else _DTYPES[dtype]
