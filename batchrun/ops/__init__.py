"""Picks the module of operations for a device. A backend is a module that exports the same few functions."""

from __future__ import annotations

from types import ModuleType


def backend(device: str, *, reproducible: bool) -> ModuleType:
    """The operations for ``cpu`` or ``cuda``; with ``reproducible`` each row's bits are its own."""
    from batchrun.ops import fixed_ops, torch_ops

    return fixed_ops if reproducible else torch_ops
