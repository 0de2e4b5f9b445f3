"""What readings of a text amount to: each configuration's figures with their standard errors, as a table or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from batchrun.job import KVCacheDType, Quantization
from batchrun.model_files import ModelFiles
from batchrun.text import format_bytes, table

_HEAD = ("configuration", "weights", "perplexity", "change", "KL, nats", "99th percentile", "same top token")
_TAIL = 0.99  # of places, below whose divergence the others' lies


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model as it is measured; the same one by whatever name."""

    name: str = field(compare=False)
    files: ModelFiles
    dtype: str
    weights: Quantization
    kv_cache: KVCacheDType


@dataclass(frozen=True, slots=True)
class Reading:
    """What a configuration predicts at each place of a text, beside what the reference does. Float64 [P] each."""

    window: np.ndarray  # int64: the window of each place
    loss: np.ndarray  # minus the log-probability, in nats, of the token that comes
    exact_loss: np.ndarray  # the reference's
    divergence: np.ndarray  # Kullback and Leibler's (1951), in nats, of the reference's distribution from this one
    same_top: np.ndarray  # 1 where both find the same token most likely, else 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error, which is None where a single window tells nothing of it."""

    value: float
    standard_error: float | None

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, None if self.standard_error is None else self.standard_error * factor)


def estimate(values: np.ndarray, window: np.ndarray) -> Estimate:
    """The mean of ``values`` [P]. Places of one window depend on one another; windows are taken not to."""
    mean = float(values.mean())
    sums = np.bincount(window, values - mean)
    if (n := len(sums)) < 2:
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(n / (n - 1) * float((sums**2).sum())) / len(values))


@dataclass(frozen=True, slots=True)
class Measured:
    """A configuration's figures. Those that compare it with the reference are None for the reference itself."""

    configuration: Configuration
    weight_bytes: int  # of all matrices
    perplexity: float
    seconds: float  # to load and to read
    change: Estimate | None = None  # of the perplexity, as a share of the reference's
    divergence: Estimate | None = None
    divergence_tail: float | None = None  # that of 99% of places is not above it
    same_top: Estimate | None = None

    @classmethod
    def of(cls, configuration: Configuration, reading: Reading, *, weight_bytes: int, seconds: float) -> Measured:
        log = estimate(reading.loss - reading.exact_loss, reading.window)
        return cls(
            configuration=configuration,
            weight_bytes=weight_bytes,
            perplexity=perplexity(reading.loss),
            seconds=seconds,
            change=Estimate(float(np.expm1(log.value)), log.scaled(float(np.exp(log.value))).standard_error),
            divergence=estimate(reading.divergence, reading.window),
            divergence_tail=float(np.quantile(reading.divergence, _TAIL)),
            same_top=estimate(reading.same_top, reading.window),
        )

    def summary(self) -> dict[str, Any]:
        """Its figures as plain data; what is not a number is None."""
        of = self.configuration
        figures = asdict(self, dict_factory=_figures)
        del figures["configuration"]
        return {
            "name": of.name,
            "model": of.files.reference,
            "revision": of.files.revision,
            "dtype": of.dtype,
            "weights": of.weights,
            "kv_cache": of.kv_cache,
            **figures,
        }

    def cells(self) -> tuple[str, ...]:
        change = "" if self.change is None else f"{_cell(self.change.scaled(100), '+.2f')} %"
        same = "" if self.same_top is None else f"{_cell(self.same_top.scaled(100), '.2f')} %"
        return (
            self.configuration.name,
            format_bytes(self.weight_bytes),
            f"{self.perplexity:.3f}",
            change,
            "" if self.divergence is None else _cell(self.divergence, ".5f"),
            "" if self.divergence_tail is None else f"{self.divergence_tail:.4f}",
            same,
        )


def perplexity(loss: np.ndarray) -> float:
    return float(np.exp(loss.mean()))


@dataclass(frozen=True, slots=True)
class Report:
    """A whole measurement: the reference first."""

    text: Path
    context: int
    places: int  # tokens that were predicted
    windows: int
    device: str
    measured: Sequence[Measured]

    def to_json(self) -> str:
        whole = {
            "text": str(self.text),
            "context": self.context,
            "windows": self.windows,
            "places": self.places,
            "device": self.device,
            "configurations": [each.summary() for each in self.measured],
        }
        return json.dumps(whole, indent=2, allow_nan=False)

    def describe(self) -> str:
        seconds = sum(each.seconds for each in self.measured)
        rows = table([_HEAD, *(each.cells() for each in self.measured)])
        read = f"{self.places:,} tokens of {self.text} predicted, in {self.windows:,} windows of up to {self.context}"
        return f"{rows}\n\n  {read}, in {seconds:.0f} s; ± is the standard error"


def _cell(of: Estimate, form: str) -> str:
    error = "" if of.standard_error is None else f" ± {of.standard_error:{form.removeprefix('+')}}"
    return f"{of.value:{form}}{error}"


def _figures(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value if not isinstance(value, float) or math.isfinite(value) else None for name, value in items}
