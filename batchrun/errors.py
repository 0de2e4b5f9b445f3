"""Exceptions that end a run, each with the exit code a shell or a scheduler sees, and the kinds of row error.

A fault of one row never raises out of a run: it becomes the text of that row's ``error`` column, ``kind: message``,
where ``kind`` is one of :data:`ROW_ERROR_KINDS`. A fault of the job is raised before the model loads.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

EXIT_OK = 0
EXIT_BAD_JOB = 2
EXIT_ROW_ERRORS = 3
EXIT_THRESHOLD = 4
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped early, run it again

RowErrorKind = Literal[
    "unreadable_row",  # the line is no JSON object, or not UTF-8
    "unreadable_file",  # the rest of a damaged file
    "bad_filter",  # input.where compares the row's value with one of another type
    "missing_value",  # a column that the prompt uses is absent or null
    "bad_prompt",  # the prompt is not text, the template failed, the messages do not fit the chat template
    "bad_sampling",  # the row's own sampling parameters are invalid
    "prompt_too_long",  # more tokens than model.max_model_len
    "engine_error",  # the engine refused this row
    "worker_died",  # the process died whenever it ran this row
]
ROW_ERROR_KINDS: tuple[str, ...] = get_args(RowErrorKind)


def row_error(kind: RowErrorKind, message: str) -> str:
    """The text of a row's ``error`` column."""
    return f"{kind}: {message}"


def without_credentials(text: str) -> str:
    """``text`` without the user names, passwords and queries (signatures, tokens) of the URLs in it."""
    return re.sub(r"(?i)(https?://[^\s?]*)\?\S*", r"\1", re.sub(r"(?<=://)[^/\s]*@", "", text))


class BatchrunError(Exception):
    """Base of every error that batchrun raises on purpose; its text is meant for the user and tells no password."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(without_credentials(message))


class JobError(BatchrunError):
    """The job file, its input, its model or the command line is wrong: nothing was loaded, nothing was run."""

    exit_code = EXIT_BAD_JOB


class ThresholdError(BatchrunError):
    """A row failed under ``errors.on_error: fail``."""

    exit_code = EXIT_THRESHOLD


class StoppedError(BatchrunError):
    """The run stopped early (signal, time limit, another holder of the output); the same command goes on."""

    exit_code = EXIT_STOPPED
