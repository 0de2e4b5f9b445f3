"""A report as a picture: what each configuration costs, by three measures side by side. Needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from batchrun.errors import JobError
from batchrun.quality.report import Estimate, Measured, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".svg", ".png")
_BAR_INCHES = 0.4


def check_plot(path: Path) -> None:
    """Raises JobError where no plot could be drawn into ``path``."""
    if path.suffix not in _SUFFIXES:
        raise JobError(f"--plot: {path} has to end in {' or '.join(_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise JobError("--plot needs matplotlib: pip install 'batchrun-llm[plot]'")


def save_plot(report: Report, path: Path) -> None:
    """Draw a report into an .svg or .png file."""
    from matplotlib.figure import Figure

    compared = [each for each in report.measured if each.divergence is not None]
    figure = Figure(figsize=(11, 1.6 + _BAR_INCHES * len(compared)), layout="constrained")
    change, divergence, parting = figure.subplots(1, 3, sharey=True)
    _bars(change, compared, "perplexity, change in %", [_percent(each.change) for each in compared])
    _bars(divergence, compared, "KL divergence, nats", [each.divergence for each in compared])
    _bars(parting, compared, "another top token, %", [_percent(_rest(each.same_top)) for each in compared])
    change.invert_yaxis()
    reference = report.measured[0].configuration
    figure.suptitle(f"against {reference.files.reference} in {reference.dtype}, {report.places:,} tokens", fontsize=10)
    figure.savefig(path)


def _bars(axes: Axes, compared: Sequence[Measured], title: str, figures: Sequence[Estimate | None]) -> None:
    """A bar for each configuration, with its standard error where there is one."""
    known = [figure or Estimate(0.0, None) for figure in figures]
    errors = [figure.standard_error or 0.0 for figure in known]
    names, values = [each.configuration.name for each in compared], [each.value for each in known]
    axes.bar_label(axes.barh(names, values, xerr=errors, capsize=3), fmt="%.3g", padding=4, fontsize=8)
    axes.margins(x=0.3)
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.axvline(0, color="black", linewidth=0.8)


def _percent(figure: Estimate | None) -> Estimate | None:
    return None if figure is None else figure.scaled(100)


def _rest(share: Estimate | None) -> Estimate | None:
    return None if share is None else Estimate(1 - share.value, share.standard_error)
