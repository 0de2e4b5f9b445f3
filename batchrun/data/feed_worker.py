"""The child of :class:`batchrun.data.feed.Feed`: receives splits, sends windows of prepared rows.

Three threads: one receives requests, so that the parent never blocks on sending them, and ends the process when the
parent is gone; one sends, so that the next window is made while the last waits to be taken; the main one works.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import Queue, SimpleQueue

from batchrun.data.feed import GO_ON, FeedError, Window
from batchrun.data.files import UnreadableFileError
from batchrun.data.prompt import PromptBuilder, prefix_order
from batchrun.data.rows import PreparedRow, Split
from batchrun.data.source import Source
from batchrun.errors import BatchrunError
from batchrun.tokenization.tokenizer import Tokenizer

_FIRST_ROWS = 256  # the first window is small, so that the engine starts soon; each later one is 4 times larger,
_MOST_ROWS = 50_000  # up to a split,
_MOST_TOKENS = 2_000_000  # or up to about 80 MB of token ids
_NICENESS = 5  # on a CPU the engine's threads come first

Request = tuple[Split, frozenset[int]]


def serve(descriptor: int) -> None:
    """Serve the parent at the other end of a connection until it closes."""
    os.nice(_NICENESS)
    connection: Connection = Connection(descriptor)
    requests: SimpleQueue[Request] = SimpleQueue()
    outbox: Queue[Window | Exception] = Queue(maxsize=1)
    receiver = threading.Thread(target=_receive, args=(connection, requests), daemon=True)
    try:
        source, prompt, sampling, model, max_model_len = connection.recv()
        receiver.start()
        threading.Thread(target=_send, args=(connection, outbox), daemon=True).start()
        builder = PromptBuilder(prompt, sampling, Tokenizer.load(model), max_model_len)
        _work(Source(source), builder, requests, outbox)
    except EOFError:
        return
    except BatchrunError as error:
        outbox.put(error)
    except MemoryError:
        outbox.put(FeedError(f"the process that prepares prompts ran out of memory; {GO_ON}"))
    except (OSError, UnreadableFileError) as error:
        outbox.put(FeedError(f"the input can no longer be read: {error}; {GO_ON}"))
    except Exception:
        outbox.put(RuntimeError(f"the process that prepares prompts failed:\n{traceback.format_exc()}"))
    receiver.join()


def _receive(connection: Connection, requests: SimpleQueue[Request]) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone: nothing that is in progress matters


def _send(connection: Connection, outbox: Queue[Window | Exception]) -> None:
    try:
        while True:
            connection.send(outbox.get())
    except OSError:
        os._exit(0)


def _work(
    source: Source, builder: PromptBuilder, requests: SimpleQueue[Request], outbox: Queue[Window | Exception]
) -> None:
    limit = _FIRST_ROWS
    while True:
        split, skip = requests.get()
        rows: list[PreparedRow] = []
        tokens = 0
        for row in _prepared(source, builder, split, skip):
            rows.append(row)
            tokens += len(row.token_ids)
            if len(rows) >= limit or tokens >= _MOST_TOKENS:
                outbox.put(Window(split.number, prefix_order(rows), last=False))
                rows, tokens, limit = [], 0, min(4 * limit, _MOST_ROWS)
        outbox.put(Window(split.number, prefix_order(rows), last=True))


def _prepared(source: Source, builder: PromptBuilder, split: Split, skip: frozenset[int]) -> Iterator[PreparedRow]:
    for group in source.row_groups(split):
        wanted = [row for row in group if row.row not in skip]
        for start in range(0, len(wanted), _FIRST_ROWS):
            yield from builder.build(wanted[start : start + _FIRST_ROWS])
