"""The classes a linear layer's weight can be. Loaders turn every checkpoint format into one of them.

:class:`Dense` is the first. Each later one (``Int8``, ``Int4``, ``Fp8``) has the same few methods, so that a model
file never knows which it holds: it builds with ``cat``, embeds with ``rows``, and hands the object to ``ops.linear``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Dense:
    """A weight stored as plain numbers.

    ``data``: contiguous ``[out, in]``, any floating dtype, on the device where it is used.
    """

    __slots__ = ("data",)

    def __init__(self, data: torch.Tensor) -> None:
        if data.ndim != 2:
            raise ValueError(f"a linear weight is [out, in], not {list(data.shape)}")
        self.data = data

    @classmethod
    def cat(cls, parts: Sequence[Dense]) -> Dense:
        """One weight ``[sum of out, in]`` whose outputs are those of ``parts`` in order."""
        return parts[0] if len(parts) == 1 else cls(torch.cat([part.data for part in parts]))

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.data.shape[0], self.data.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that activations multiplied by this weight have."""
        return self.data.dtype

    def dequantize(self) -> torch.Tensor:
        """The weight as plain numbers ``[out, in]``. For ``Dense`` its own storage: not to be written to."""
        return self.data

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (integers ``[...]``) as ``[..., in]``: the embedding lookup."""
        return torch.nn.functional.embedding(ids, self.data)
