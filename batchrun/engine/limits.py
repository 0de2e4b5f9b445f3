"""The bounds of a step: as a job sets them, by default, or by what was measured to be faster. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from batchrun.engine.memory import Device
from batchrun.engine.scheduler import Limits
from batchrun.engine.step_times import StepTimes
from batchrun.errors import JobError
from batchrun.job import EngineSpec

_MAX_NUM_SEQS = {"cpu": 256, "cuda": 1024}
_MAX_NUM_BATCHED_TOKENS = {"cpu": 3072, "cuda": 16384}
_SEQS_CHOICES = (256, 512, 1024)  # none below the default: fewer sequences are a job's to ask for
_TOKENS_CHOICES = (1024, 2048, 3072, 4096)
_NOISE = 0.05  # of the least time for a token: what measured times differ by from one moment to another
_TOKENS_PER_SEQUENCE = 2  # that an automatic bound leaves at least, so that prompts come in while all sequences run
DRAFT_ROWS = 64  # of logits of a step, for drafts, beside those that sequences leave free
_LOGIT_BYTES = 4  # float32
_MAX_LOGITS_BYTES = 256 << 20  # of a step: no budget counts them


def resolve_limits(spec: EngineSpec, device: Device, times: StepTimes | None = None) -> Limits:
    """The bounds of a step: those that are set, and for ``auto`` the defaults, or what ``times`` show to be faster.

    Raises JobError where both are set and a step has less than one token for each running sequence.
    """
    most, budget = spec.max_num_seqs, spec.max_num_batched_tokens
    seqs = _choose_seqs(_MAX_NUM_SEQS[device], times) if most == "auto" else most
    if most == "auto" and budget != "auto":
        seqs = max(1, min(seqs, budget // _TOKENS_PER_SEQUENCE))
    if budget == "auto":
        tokens = max(_choose_tokens(_MAX_NUM_BATCHED_TOKENS[device], times), _TOKENS_PER_SEQUENCE * seqs)
    elif budget >= seqs:
        tokens = budget
    else:
        raise JobError(
            f"engine.max_num_batched_tokens: {budget} is below max_num_seqs ({seqs}): every "
            "running sequence takes at least one token of a step"
        )
    return Limits(seqs, tokens, spec.enable_prefix_caching)


def logits_fit(rows: int, vocab_size: int) -> bool:
    """Whether the logits of so many rows are so few bytes that a bound may be raised to them."""
    return rows * vocab_size * _LOGIT_BYTES <= _MAX_LOGITS_BYTES


def _choose_seqs(default: int, times: StepTimes | None) -> int:
    if times is None:
        return default
    choices = [n for n in _SEQS_CHOICES if n == default or logits_fit(n, times.vocab_size)]
    return _fastest({n: times.seconds(n, n) / n for n in choices}, default)


def _choose_tokens(default: int, times: StepTimes | None) -> int:
    if times is None:
        return default
    return _fastest({n: times.seconds(n, 0) / n for n in _TOKENS_CHOICES}, default)


def _fastest(costs: Mapping[int, float], default: int) -> int:
    """``default`` unless its cost is clearly above the least; then the smallest size for which that is not so."""
    near = [size for size, cost in costs.items() if cost <= min(costs.values()) * (1 + _NOISE)]
    return default if default in near else min(near)
