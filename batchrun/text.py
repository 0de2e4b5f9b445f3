"""Numbers for people and back: sizes, durations, counts, tables."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def format_bytes(count: float) -> str:
    """``1.5 GiB``: a size in powers of 1024."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def format_count(count: float) -> str:
    """``950``, ``12.3k``, ``4.5M``, ``7.0G``, ``2.1T``: a count in a few characters."""
    if abs(count) < 999.5:
        return f"{count:.0f}"
    for unit in "kMG":
        count /= 1000
        if abs(count) < 999.95:
            return f"{count:.1f}{unit}"
    return f"{count / 1000:.1f}T"


def format_duration(seconds: float) -> str:
    """``8s``, ``2m05s``, ``3h07m``, ``2d04h``: a duration in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def parse_duration(text: str) -> float:
    """Seconds of ``90``, ``15m``, ``1h30m``, ``04:00:00`` or ``2-12:00:00``. ValueError: none of these."""
    text = text.strip().lower()
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})", text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
        return sum(float(number) * _UNITS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([dhms])", text))
    raise ValueError(f"{text!r} is no duration; write 90, 15m, 1h30m or 04:00:00")


def parse_slurm_time(text: str) -> int:
    """Seconds of a time limit as Slurm writes it: ``90`` (minutes), ``90:00``, ``01:30:00``, ``2-12``, ``2-12:00`` or
    ``2-12:00:00``. ValueError: none of these, or no time at all.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"must be a time limit as Slurm writes it, such as 04:00:00 or 2-12:00:00, not {text!r}")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ValueError(f"must be a time limit above zero, not {text!r}")
    return total


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Lines of left-aligned columns."""
    rows = list(rows)
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        indent + "  ".join(_padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def display_width(text: str) -> int:
    """Columns of a terminal that the text takes: two for a wide character, none for one that combines."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def shorten(text: str, width: int) -> str:
    """The text on one line of at most ``width`` terminal columns, with nothing in it that a terminal acts on."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * width])
    line = " ".join(line.split())
    if display_width(line) <= width and len(text) <= 4 * width:
        return line
    taken = 0
    for place, character in enumerate(line):
        taken += _columns(character)
        if taken >= width:
            return line[:place] + "…"
    return line + "…"


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _padded(text: str, width: int) -> str:
    return text + " " * (width - display_width(text))
