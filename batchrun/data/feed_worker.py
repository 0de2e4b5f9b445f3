"""The child of :class:`batchrun.data.feed.Feed`: receives orders, sends windows of prepared rows.

Three threads: one receives orders, so that the parent never blocks on sending them, and ends the process when the
parent is gone; one sends, so that the next window is made while the last waits to be taken; the main one works.
"""

from __future__ import annotations

import os
import threading
import traceback
from array import array
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import Queue, SimpleQueue

from batchrun.data.feed import GO_ON, FeedError, Order, Window
from batchrun.data.files import UnreadableFileError
from batchrun.data.prompt import PromptBuilder, prefix_order
from batchrun.data.rows import PreparedRow
from batchrun.data.source import Source
from batchrun.errors import BatchrunError
from batchrun.tokenization.tokenizer import Tokenizer

_FIRST_ROWS = 256  # the first window is small, so that the engine starts soon; each later one is 4 times larger,
_MOST_ROWS = 50_000  # up to a split,
_MOST_TOKENS = 2_000_000  # or up to 8 MB of token ids
_NICENESS = 5  # on a CPU the engine's threads come first


def serve(descriptor: int) -> None:
    """Serve the parent at the other end of a connection until it closes."""
    os.nice(_NICENESS)
    connection: Connection = Connection(descriptor)
    orders: SimpleQueue[Order] = SimpleQueue()
    outbox: Queue[Window | Exception] = Queue(maxsize=1)
    receiver = threading.Thread(target=_receive, args=(connection, orders), daemon=True)
    try:
        source, prompt, sampling, model, max_model_len = connection.recv()
        receiver.start()
        threading.Thread(target=_send, args=(connection, outbox), daemon=True).start()
        builder = PromptBuilder(prompt, sampling, Tokenizer.load(model), max_model_len)
        _work(Source(source), builder, orders, outbox)
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


def _receive(connection: Connection, orders: SimpleQueue[Order]) -> None:
    try:
        while True:
            orders.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone: nothing that is in progress matters


def _send(connection: Connection, outbox: Queue[Window | Exception]) -> None:
    try:
        while True:
            connection.send(outbox.get())
    except OSError:
        os._exit(0)


def _work(
    source: Source, builder: PromptBuilder, orders: SimpleQueue[Order], outbox: Queue[Window | Exception]
) -> None:
    limit = _FIRST_ROWS
    while True:
        order = orders.get()
        rows: list[PreparedRow] = []
        tokens = 0
        for row in _prepared(source, builder, order):
            rows.append(row)
            tokens += len(row.token_ids)
            if len(rows) >= limit or tokens >= _MOST_TOKENS:
                outbox.put(Window(order.name, prefix_order(rows), last=False))
                rows, tokens, limit = [], 0, min(4 * limit, _MOST_ROWS)
        outbox.put(Window(order.name, prefix_order(rows), last=True))


def _prepared(source: Source, builder: PromptBuilder, order: Order) -> Iterator[PreparedRow]:
    for group in source.row_groups(order.split):
        wanted = [row for row in group if row.row not in order.skip and (order.only is None or row.row in order.only)]
        for start in range(0, len(wanted), _FIRST_ROWS):
            for prepared in builder.build(wanted[start : start + _FIRST_ROWS]):
                if order.max_tokens is not None and prepared.params is not None:
                    prepared.params = prepared.params.model_copy(update={"max_tokens": order.max_tokens})
                prepared.token_ids = array("I", prepared.token_ids)  # see Window
                yield prepared
