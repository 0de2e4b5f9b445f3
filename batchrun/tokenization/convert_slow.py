"""Models that come with a ``tokenizer.model`` or ``vocab.json`` only, converted once into the cache.

The conversion is transformers' own, in a process of its own, for importing it would bring torch into this one.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from batchrun.errors import JobError
from batchrun.kernels.machine import cache_dir
from batchrun.model_files import ModelFiles

_CONVERT = """
import sys
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False).backend_tokenizer.save(sys.argv[2])
"""


def converted(files: ModelFiles) -> Path:
    """The ``tokenizer.json`` made from this model's tokenizer files. Raises :class:`JobError` if that fails."""
    folder = files.tokenizer.parent
    names = (files.tokenizer.name, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "config.json")
    key = hashlib.blake2b(digest_size=16)
    for name in names:
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        key.update(f"{name}\0{len(content)}\0".encode() + content)
    target = Path(cache_dir(), "tokenizers", key.hexdigest(), "tokenizer.json")
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            draft = Path(scratch) / target.name
            _convert(files, folder, draft)
            draft.replace(target)
    return target


def _convert(files: ModelFiles, source: Path, target: Path) -> None:
    command = [sys.executable, "-c", _CONVERT, str(source.resolve()), str(target.resolve())]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not target.is_file():
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"the conversion ended with code {done.returncode}"
        raise JobError(
            f"{files.reference}: there is no tokenizer.json, and transformers cannot make one from "
            f"{files.tokenizer.name}: {reason}"
        )
