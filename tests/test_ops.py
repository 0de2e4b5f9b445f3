"""The backends are one interface: the same functions with the same parameters."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from batchrun.numerics import numerics
from batchrun.ops import torch_ops

BACKENDS = ["fixed_ops", "native_ops", "onednn_ops", "fixed_onednn_ops"]
ON_GPU = ["triton_ops", "fixed_triton_ops"]
OF_GRAPHS = {"fill_plan"}  # what a backend has beside, if its steps can be captured


def parameters(module: ModuleType, name: str) -> list[tuple[str, object, object]]:
    """Name, kind and default of each parameter of a function."""
    return [
        (each.name, each.kind, each.default) for each in inspect.signature(getattr(module, name)).parameters.values()
    ]


@pytest.mark.parametrize("name", [*BACKENDS, *ON_GPU])
def test_every_backend_has_the_functions_of_the_reference(name: str) -> None:
    if name in ON_GPU and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    module = importlib.import_module(f"batchrun.ops.{name}")
    assert set(module.__all__) - OF_GRAPHS == set(torch_ops.__all__)
    for function in torch_ops.__all__:
        assert parameters(module, function) == parameters(torch_ops, function), function


def test_numerics_of_a_gpu_name_its_kernels_and_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert numerics("cuda", "bfloat16", 64, reproducible=False) == "any"
    named = numerics("cuda", "bfloat16", 64, reproducible=True)
    assert re.fullmatch(r"fixed_triton_ops [0-9a-f]{12}, Triton [\d.]+ on a card, torch \S+", named)
