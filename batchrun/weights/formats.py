"""The classes a linear layer's weight can be. Loaders turn every checkpoint format into one of them.

:class:`Dense` is the first. Each later one (``Int8``, ``Int4``, ``Fp8``) has the same few methods, so that a model
file never knows which it holds: it embeds with ``rows`` and hands the object to ``ops.linear``.
"""

from __future__ import annotations

import torch

_PACKED_ROWS = 64  # rows of activations that oneDNN is told to lay weights out for


class Dense:
    """A weight ``[out, in]`` stored as plain numbers of any floating dtype, on the device where it is used."""

    __slots__ = ("_data", "dtype", "packed", "shape")

    def __init__(self, data: torch.Tensor) -> None:
        if data.ndim != 2:
            raise ValueError(f"a linear weight is [out, in], not {list(data.shape)}")
        self._data: torch.Tensor | None = data
        self.shape = (data.shape[0], data.shape[1])
        self.dtype = data.dtype  # of the activations that are multiplied by it
        self.packed: torch.Tensor | None = None  # the same numbers in oneDNN's layout, once `pack` made it

    def pack(self, *, keep_rows: bool = False) -> None:
        """Lay the weight out for oneDNN's matrix product. CPU only; without ``keep_rows`` the plain form is freed.

        bfloat16 is packed as float32 where the processor cannot multiply it, which is ten times faster there.
        """
        data = self.dequantize()
        native = self.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(data if native else data.float(), _PACKED_ROWS)
        if not keep_rows:
            self._data = None

    def dequantize(self) -> torch.Tensor:
        """The weight as plain numbers ``[out, in]``; its own storage where there is one: not to be written to."""
        if self._data is not None:
            return self._data
        assert self.packed is not None
        return self.packed.to_dense().to(self.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (integers ``[...]``) as ``[..., in]``: the embedding lookup."""
        return torch.nn.functional.embedding(ids, self.dequantize())
