"""Measures what quantization costs: a model reads a text in each configuration, beside a reference that reads the same.

The text is given, token by token, so that what a configuration predicts at each place follows from it alone, and not
from what it would have written itself. Importing this loads no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from batchrun.engine.memory import Device, context_length, resolve_device, resolve_dtype
from batchrun.errors import JobError
from batchrun.job import KVCacheDType, Quantization
from batchrun.model_files import ModelFiles, resolve
from batchrun.quality.plot import check_plot, save_plot
from batchrun.quality.report import Configuration, Measured, Report
from batchrun.tokenization.tokenizer import Tokenizer

WEIGHTS: tuple[Quantization, ...] = get_args(Quantization)
KV_CACHES: tuple[KVCacheDType, ...] = get_args(KVCacheDType)


def run_quality(
    model: str,
    text: Path,
    *,
    against: str | None = None,
    weights: Sequence[Quantization],
    kv_caches: Sequence[KVCacheDType],
    dtype: str = "auto",
    device: str = "auto",
    context: int,
    limit: int | None = None,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare ``model``, with each of ``weights`` and each of ``kv_caches``, with ``against``, or with itself.

    Reads the first ``limit`` tokens of ``text``, a UTF-8 file, in windows of ``context`` tokens. Writes the report to
    ``json_path`` and ``plot_path`` where they are given; ``say`` is told what is being read.

    Raises JobError where there is nothing to measure.
    """
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise JobError(f"{option}: {path} cannot be written: there is no such directory, or it is read-only")
    if plot_path is not None:
        check_plot(plot_path)
    content = read_text(text)
    place = resolve_device(device)
    files = resolve(model)
    reference = files if against is None else resolve(against)
    for which in (files, reference):
        if (longest := context_length(which.config)) < context:
            raise JobError(f"--context: {context} is above the {longest} tokens that {which.reference} was made for")
    windows = cut(*tokenize(content, files, reference, limit), context)
    if not windows:
        raise JobError(f"--text: {text} has too little text: no token follows another")
    exact = Configuration("reference float32", reference, "float32", "dequantize", "auto")
    others = configurations(files, reference, resolve_dtype(dtype, place), weights, kv_caches)
    measured = _measure(exact, [each for each in others if each != exact], windows, place, context, say)
    places = sum(len(window) - 1 for window in windows)
    report = Report(text, context, places, len(windows), place, measured)
    try:
        if json_path is not None:
            json_path.write_text(report.to_json() + "\n", encoding="utf-8")
        if plot_path is not None:
            save_plot(report, plot_path)
    except OSError as error:  # the figures took long to make
        say(f"{report.describe()}\n")
        raise JobError(f"--json, --plot: {error.filename or ''} cannot be written: {error.strerror}") from None
    return report


def configurations(
    files: ModelFiles,
    reference: ModelFiles,
    dtype: str,
    weights: Sequence[Quantization],
    kv_caches: Sequence[KVCacheDType],
) -> list[Configuration]:
    """What is compared, each once: the reference in ``dtype`` first, by which its cost is told from quantization's."""
    found = [Configuration(f"reference {dtype}", reference, dtype, "dequantize", "auto")]
    for each in weights:
        for kv_cache in kv_caches:
            name = each if kv_cache == "auto" else f"{each}, KV {kv_cache}"
            configuration = Configuration(name, files, dtype, each, kv_cache)
            if configuration not in found:
                found.append(configuration)
    return found


def read_text(path: Path) -> str:
    """The text of a file. Raises JobError where it is not UTF-8 or there is none in it."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise JobError(f"--text: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"--text: {path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    if not text.strip():
        raise JobError(f"--text: {path} holds no text")
    return text


def tokenize(
    text: str, files: ModelFiles, reference: ModelFiles, limit: int | None = None
) -> tuple[list[int], list[int]]:
    """What the reference's tokenizer puts before a text, and the text's first ``limit`` token ids.

    Raises JobError where the model's tokenizer makes others of it, or its vocabulary is of another size.
    """
    tokenizer = Tokenizer.load(reference)
    ids, whole = (tokenizer.encode(text, add_special_tokens=special) for special in (False, True))
    if files != reference:
        sizes = [each.config["vocab_size"] for each in (files, reference)]
        if sizes[0] != sizes[1] or Tokenizer.load(files).encode(text, add_special_tokens=False) != ids:
            raise JobError(
                f"--against: {reference.reference} has another vocabulary than {files.reference}: what they predict "
                "cannot be compared"
            )
    before = next((n for n in range(len(whole)) if whole[n : n + len(ids)] == ids), 0)
    return whole[:before], ids[:limit]


def cut(begin: Sequence[int], ids: Sequence[int], context: int) -> list[list[int]]:
    """Windows of at most ``context`` tokens that do not overlap, ``begin`` before each.

    What is predicted in a window is all of it but the first token, so that none has fewer than two.
    """
    size = context - len(begin)
    windows = ([*begin, *ids[start : start + size]] for start in range(0, len(ids), size))
    return [window for window in windows if len(window) > 1]


def _measure(
    exact: Configuration,
    others: Sequence[Configuration],
    windows: Sequence[Sequence[int]],
    device: Device,
    context: int,
    say: Callable[[str], None],
) -> list[Measured]:
    from batchrun.quality.reading import measure  # torch, which takes seconds, once all else is known to be right

    return measure(exact, others, windows, device, context, say)
