"""The inputs of a step on their way to the device: every tensor of them in one buffer, in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of each tensor in the buffer
_BUFFERS = 4  # a step sends two times at most, and two steps are on their way: with these, none is waited for

Inputs = TypeVar("Inputs")


class Placed(NamedTuple):
    """Where a tensor lies in the buffer."""

    start: int  # byte
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = tuple[Placed, ...]  # of each tensor of the inputs, in their order


class Transfer:
    """Moves frozen dataclasses that hold CPU tensors, lists and other dataclasses to ``device``, without waiting.

    The host's buffers are used again in turn, each once its copy has been made. On a CPU inputs stay as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hosts = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._copied = [torch.cuda.Event(blocking=True) for _ in self._hosts] if device.type == "cuda" else []
        self._turn = 0

    def send(self, inputs: Inputs, to: Tensor | None = None) -> Inputs:
        """The same inputs with their tensors on the device, in the bytes ``to`` or in new ones."""
        if self.device.type == "cpu" and to is None:
            return inputs
        tensors = list(tensors_of(inputs))
        layout = layout_of(tensors)
        host = self._fill(tensors, layout)
        if to is None:
            to = torch.empty_like(host, device=self.device)
        to[: len(host)].copy_(host, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        return rebuilt(inputs, [_at(to, placed) for placed in layout])

    def _fill(self, tensors: list[Tensor], layout: Layout) -> Tensor:
        size = bytes_of(layout)
        self._turn = (self._turn + 1) % _BUFFERS
        if self._copied:
            self._copied[self._turn].synchronize()
        if len(self._hosts[self._turn]) < size:
            pinned = self.device.type == "cuda"
            self._hosts[self._turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=pinned)
        host = self._hosts[self._turn][:size]
        for tensor, placed in zip(tensors, layout, strict=True):
            _at(host, placed).copy_(tensor)
        return host


def layout_of(tensors: list[Tensor]) -> Layout:
    """A place for each, one after the other."""
    start, layout = 0, []
    for tensor in tensors:
        layout.append(Placed(start, tuple(tensor.shape), tensor.dtype))
        start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(layout)


def bytes_of(layout: Layout) -> int:
    """Bytes of a buffer of this layout."""
    return max((-(-_end(placed) // _ALIGNMENT) * _ALIGNMENT for placed in layout), default=0)


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """The tensors of some inputs, in order; one that comes twice is one of each."""
    return (leaf for leaf in _leaves(inputs) if isinstance(leaf, Tensor))


def numbers_of(inputs: Any) -> Iterator[object]:
    """What inputs hold beside tensors, in order."""
    return (leaf for leaf in _leaves(inputs) if not isinstance(leaf, Tensor))


def _leaves(inputs: Any) -> Iterator[object]:
    if isinstance(inputs, list):
        for each in inputs:
            yield from _leaves(each)
    elif is_dataclass(inputs):
        for field in fields(inputs):
            yield from _leaves(getattr(inputs, field.name))
    else:
        yield inputs


def rebuilt(inputs: Inputs, tensors: Iterable[Tensor]) -> Inputs:
    """The same inputs with other tensors, in the order of `tensors_of`."""
    same: Inputs = _rebuilt(inputs, iter(tensors))
    return same


def _rebuilt(inputs: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(inputs, Tensor):
        return next(tensors)
    if isinstance(inputs, list):
        return [_rebuilt(each, tensors) for each in inputs]
    if is_dataclass(inputs) and not isinstance(inputs, type):
        names = [field.name for field in fields(inputs)]
        return replace(inputs, **{name: _rebuilt(getattr(inputs, name), tensors) for name in names})
    return inputs


def _end(placed: Placed) -> int:
    return placed.start + placed.dtype.itemsize * torch.Size(placed.shape).numel()


def _at(buffer: Tensor, placed: Placed) -> Tensor:
    return buffer[placed.start : _end(placed)].view(placed.dtype).view(placed.shape)
