"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.services import s3 as s3
from tests.services import slurm as slurm
from tests.services import slurm_configuration as slurm_configuration

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers are the parallelism
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test has more threads, idle ones are not to spin


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for Slurm come first: at the end, the other workers would wait for theirs."""
    items.sort(key=lambda item: "slurm" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random three-layer Llama with a byte-level tokenizer."""
    from tests.models import save_model

    return save_model(tmp_path_factory.mktemp("models") / "llama")
