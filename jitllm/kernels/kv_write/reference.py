"""KV pages in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def page_views(
    page: NDArray[np.uint8],
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    page_tokens: int,
    kv_element: str,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """A page's bytes as keys [kv_heads, k_dim, P] and values [kv_heads, P, v_dim], not copied."""
    elements = page.view(np.float16 if kv_element == "f16" else np.float32)
    split = kv_heads * k_dim * page_tokens
    keys = elements[:split].reshape(kv_heads, k_dim, page_tokens)
    values = elements[split:].reshape(kv_heads, page_tokens, v_dim)
    return keys, values


def kv_write(
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    positions: NDArray[np.int32],
    pages: Sequence[Sequence[tuple[NDArray[Any], NDArray[Any]]]],
    row_of: NDArray[np.int32],
) -> None:
    """Store k [tokens, kv_heads, k_dim] and v [tokens, kv_heads, v_dim] into the page views
    `pages[row][page]`."""
    for t, (position, row) in enumerate(zip(positions, row_of, strict=True)):
        page_tokens = pages[row][0][1].shape[1]
        keys, values = pages[row][position // page_tokens]
        with np.errstate(over="ignore"):
            keys[:, :, position % page_tokens] = k[t]
            values[:, position % page_tokens] = v[t]
