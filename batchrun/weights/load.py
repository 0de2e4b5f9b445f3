"""Handing a checkpoint's tensors to a model: fused, converted, checked, and every one of them accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from batchrun.errors import JobError
from batchrun.weights.formats import Dense, Packer, Weight, cat
from batchrun.weights.quantize import PLAIN, Quantizer
from batchrun.weights.source import WeightSource, open_weights
from batchrun.weights.stored import UNUSABLE, StoredTensor

__all__ = ["Loader", "open_weights"]

# What a model may leave: a buffer that old checkpoints saved although it follows from the config, and the output
# projection, stored beside the embedding that a tied model uses in its place.
_JUNK = re.compile(r"rotary_emb\.inv_freq$|^lm_head\.weight$")
_MAX_SHOWN = 8


class Loader:
    """Takes tensors out of a :class:`WeightSource` in ``dtype`` on ``device``.

    ``quantize`` makes the weights of linear layers of plain ones, and ``pack`` lays them out. ``keep``: what the
    checkpoint holds quantized stays so.

    Every method raises :class:`JobError`, naming the tensor and its file, where the checkpoint is not what the model
    expects.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        pack: Packer = lambda _: None,
        quantize: Quantizer = PLAIN,
        *,
        keep: bool = True,
    ) -> None:
        self._source = source
        self._pack = pack
        self._quantize = quantize
        self._keep = keep
        self.dtype = dtype
        self.device = torch.device(device)
        self._names = source.names()
        self._left = set(self._names)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self._names

    def take(self, *names: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor, or several joined along their first dimension; checked against ``shape`` if given."""
        parts = [self._stored(name) for name in names]
        found = self._joined_shape(names, parts, shape)
        out = torch.empty(found, dtype=self.dtype, device=self.device)
        start = 0
        with _named(names, parts):
            for part in parts:
                part.copy_into(out[start : start + part.shape[0]])
                start += part.shape[0]
        self._left.difference_update(names)
        return out

    def take_linear(
        self, *names: str, shape: tuple[int, int], importance: Callable[[], torch.Tensor] | None = None
    ) -> Weight:
        """The weight of a linear layer ``[out, in]``; of several that share their input, joined along ``out``.

        ``importance`` tells how much columns count, ``[in]``, where they are to be rounded.
        """
        weight = self._quantized(*names, shape=shape)
        if weight is None:
            weight = self._quantize(self.take(*names, shape=shape), importance)
            weight.pack(self._pack)
        return weight

    def take_table(self, name: str, *, shape: tuple[int, int], keep_rows: bool = False) -> Weight:
        """The embedding or the output projection ``[vocabulary, hidden]``, quantized only where the checkpoint is.

        ``keep_rows`` says that its rows are looked up.
        """
        weight = self._quantized(name, shape=shape, keep_rows=keep_rows)
        if weight is None:
            weight = Dense(self.take(name, shape=shape))
            weight.pack(self._pack, keep_rows=keep_rows)
        return weight

    def finish(self) -> None:
        """Fail if some tensor was never taken: a model that leaves part of a checkpoint is not that checkpoint's."""
        left = sorted(name for name in self._left if not (_JUNK.search(name) or self._adds_nothing(name)))
        if left:
            more = f" and {len(left) - _MAX_SHOWN} more" if len(left) > _MAX_SHOWN else ""
            shown = ", ".join(left[:_MAX_SHOWN])
            raise JobError(f"{self._source[left[0]].path}: tensors that this model has no place for: {shown}{more}")

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros: old GPTQ checkpoints have one in each layer, whatever the model has."""
        return name.endswith(".bias") and not self._source.get(name).any()

    def _quantized(self, *names: str, shape: tuple[int, int], keep_rows: bool = False) -> Weight | None:
        """Tensors that are all quantized, as they are, packed; None where one is not, or they are not kept."""
        parts = [self._stored(name) for name in names]
        self._joined_shape(names, parts, shape)
        with _named(names, parts):
            weight = self._joined(parts) if self._keep else None
            if weight is not None:
                weight.pack(self._pack, keep_rows=keep_rows)
                self._left.difference_update(names)
        return weight

    def _joined(self, parts: Sequence[StoredTensor]) -> Weight | None:
        """The parts as they are, joined along ``out``; None where one is not quantized."""
        weights = [part.quantized(self.dtype) for part in parts]
        if any(weight is None for weight in weights):
            return None
        return cat([weight.to(self.device) for weight in weights if weight is not None])

    def _joined_shape(
        self, names: Sequence[str], parts: Sequence[StoredTensor], shape: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        """The shape of the tensors joined along their first dimension; checked against ``shape`` if given."""
        found = (sum(sum(part.shape[:1]) for part in parts), *parts[0].shape[1:])
        expected = found if shape is None else tuple(shape)
        if found != expected or any(not part.shape or part.shape[1:] != expected[1:] for part in parts):
            shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(names, parts, strict=True))
            raise JobError(f"{parts[0].path}: shape mismatch: found {shapes}, expected {list(expected)} in all")
        return found

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._names:
            holders = ", ".join(sorted({str(self._source[other].path) for other in self._names}))
            raise JobError(f"{holders}: tensor {name} is missing")
        return self._source[name]


@contextmanager
def _named(names: Sequence[str], parts: Sequence[StoredTensor]) -> Iterator[None]:
    """What goes wrong in making a weight of stored tensors becomes a :class:`JobError` that names them."""
    try:
        yield
    except torch.OutOfMemoryError:  # the device's fault, not theirs
        raise
    except UNUSABLE as error:
        raise JobError(f"{parts[0].path}: {', '.join(names)} cannot be used: {error}") from error
