"""Whether keys can be kept in 8 or 4 bits: not where a bias makes a few elements far larger than the others.

All elements of a token's key share a scale, which goes by the largest of them. A bias is the same in every token: if it
is the largest by far, few numbers are left to what tells tokens apart. Qwen2 and 2.5 have layers like that.
"""

from __future__ import annotations

from torch import Tensor

from batchrun.errors import JobError
from batchrun.weights.formats import Weight

# Times the size of a key's elements without the bias. A scale that goes by so many takes what 8 bits lose from next to
# nothing to half a percent of perplexity (SmolLM2 135M); by 20 times it is 1.5 and by 40 times 7 percent.
_MOST = 10.0
_LEAST = 1e-30  # of that size, for heads that are zeros


def check_key_bias(
    weight: Weight, bias: Tensor, norm: Tensor, keys: Tensor, n_heads: int, *, layer: int, kept_as: str
) -> None:
    """Raises JobError where the bias of a layer's keys is an outlier, and they would be ``kept_as`` 8 or 4 bits.

    ``keys`` are the rows of ``weight`` [N, H] and ``bias`` [N] that make the keys of ``n_heads`` heads, and ``norm``
    [H] the weight of the norm that their inputs have passed. Before that weight such inputs are about 1, so that an
    element of a key is about as large as its row's norm; a head's are so at the root of their mean square.
    """
    rows = weight.rows(keys).float() * norm.float()
    typical = rows.square().sum(1).view(n_heads, -1).mean(1).sqrt().clamp(min=_LEAST)
    largest = bias[keys].float().abs().view(n_heads, -1).amax(1)
    ratio, head = (largest / typical).max(0)
    if ratio > _MOST:
        raise JobError(
            f"model.kv_cache_dtype: {kept_as} cannot hold the keys of layer {layer}: their bias reaches "
            f"{float(largest[head]):.3g}, {float(ratio):.0f} times what they are without it, of which little would "
            "be left; use kv_cache_dtype: bf16"
        )
