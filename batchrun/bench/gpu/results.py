"""The results as they come: on the terminal, and in files that are whole and valid at every moment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchrun.bench.gpu.budget import FAILED, Line
from batchrun.errors import JobError


class Results:
    """Lines by part. The files are replaced with each new line, so that whoever reads them meets whole ones."""

    def __init__(self, json_path: Path | None, markdown_path: Path | None, echo: Callable[[str], None]) -> None:
        self.environment: dict[str, Any] = {}
        self.lines: dict[str, list[Line]] = {}
        self.complete = False
        if json_path is not None and json_path == markdown_path:
            raise JobError(f"{json_path}: --json and --markdown cannot be one file")
        resolved = [path and path.resolve() for path in (json_path, markdown_path)]
        self._files = list(zip(resolved, (self.to_json, self.to_markdown), strict=True))
        self._echo = echo
        try:
            self._write()
        except OSError as error:
            files = " and ".join(str(path) for path in (json_path, markdown_path) if path)
            raise JobError(f"{files}: cannot be written: {error.strerror}") from None

    def describe_environment(self, environment: Mapping[str, Any]) -> None:
        """What was measured on what; every worker tells it."""
        if environment != self.environment:
            self.environment = dict(environment)
            self._write()
            self._echo(_pairs(environment))

    def add(self, part: str, line: Line) -> None:
        self.lines.setdefault(part, []).append(line)
        self._write()
        self._echo(f"{part}: {line.name}: {line.status}  {_pairs(line.figures)}".rstrip())

    def finish(self) -> None:
        self.complete = True
        self._write()

    @property
    def failed(self) -> int:
        """How many lines are failures."""
        return sum(line.status == FAILED for lines in self.lines.values() for line in lines)

    def to_json(self) -> str:
        lines = [{"part": part, **asdict(line)} for part, lines in self.lines.items() for line in lines]
        return json.dumps({"complete": self.complete, "environment": self.environment, "lines": lines}, indent=1)

    def to_markdown(self) -> str:
        state = "all that there was time for" if self.complete else "not finished"
        text = [f"# GPU kernels and engine ({state})", "", _pairs(self.environment)]
        for part, lines in self.lines.items():
            text += ["", f"## {part}", *_tables(lines)]
        return "\n".join([*text, ""])

    def _write(self) -> None:
        for path, text in self._files:
            if path is not None and path.exists() and not path.is_file():  # a pipe or a device
                path.write_text(text(), encoding="utf-8")
            elif path is not None:
                new = path.with_name(f".{path.name}.new")
                new.write_text(text(), encoding="utf-8")
                new.replace(path)


def _tables(lines: Sequence[Line]) -> Iterator[str]:
    """A table for each kind of line, which is told by its first figure."""
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        kinds.setdefault(next(iter(line.figures), ""), []).append(line)
    for alike in kinds.values():
        yield ""
        yield from _table(alike)


def _table(lines: Sequence[Line]) -> list[str]:
    """A Markdown table whose columns are the figures, in the order in which they first come."""
    columns = list(dict.fromkeys(name for line in lines for name in line.figures))
    rows = [[line.name, line.status, *(_shown(line.figures.get(name)) for name in columns)] for line in lines]
    return [_row(["", "status", *columns]), _row(["---"] * (len(columns) + 2)), *map(_row, rows)]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _pairs(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in figures.items() if value is not None)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
