"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random three-layer Llama with a byte-level tokenizer."""
    from tests.models import save_model

    return save_model(tmp_path_factory.mktemp("models") / "llama")
