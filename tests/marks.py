"""What tests need of the machine that they run on."""

from __future__ import annotations

import pytest

from batchrun.kernels.cpu import build


def has_compiler() -> bool:
    try:
        return bool(build.find_compiler())
    except build.BuildError:
        return False


# Where there is a compiler, kernels that it cannot build are a failure.
needs_kernels = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
