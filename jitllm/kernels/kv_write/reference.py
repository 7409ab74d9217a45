"""KV pages in NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Views = tuple[NDArray[Any], ...]
"""The matrices of a page, not copied: keys, values, and the scales of both if they have any."""


def page_views(
    page: NDArray[np.uint8],
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    page_tokens: int,
    kv_element: str,
) -> Views:
    """A page's bytes as keys [kv_heads, k_dim, P] and values [kv_heads, P, v_dim]; in q8_0 keys
    [kv_heads, k_dim / 4, P, 4], and the scales of keys and of values [kv_heads, groups, P]."""
    keys, values = (kv_heads, k_dim, page_tokens), (kv_heads, page_tokens, v_dim)
    parts: list[tuple[str, tuple[int, ...]]]
    if kv_element == "q8_0":
        parts = [("i1", (kv_heads, k_dim // 4, page_tokens, 4)), ("i1", values)]
        parts += [("f2", (kv_heads, dim // 32, page_tokens)) for dim in (k_dim, v_dim)]
    else:
        kind = "f2" if kv_element == "f16" else "f4"
        parts = [(kind, keys), (kind, values)]
    views, at = [], 0
    for kind, shape in parts:
        num_bytes = math.prod(shape) * np.dtype(kind).itemsize
        views.append(page[at : at + num_bytes].view(kind).reshape(shape))
        at += num_bytes
    assert at == len(page)
    return tuple(views)


def quantize_q8_0(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """q [..., dim] and scales [..., dim / 32] of x [..., dim]."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(amax == 0, np.float32(0), np.float32(127) / amax)
        scaled = groups * inverse
        # 127 / amax overflows where amax is below 4e-37: a zero times infinity then counts as -127.
        scaled = np.clip(np.where(np.isnan(scaled), np.float32(-127), scaled), -127, 127)
        scales = (amax[..., 0] / np.float32(127)).astype(np.float16)
    return np.rint(scaled).astype(np.int8).reshape(x.shape), scales


def stored(x: NDArray[np.float32], kv_element: str) -> NDArray[np.float64]:
    """What keys or values [..., dim] are once they are in a page."""
    if kv_element == "q8_0":
        q, scales = quantize_q8_0(x)
        return q.astype(np.float64) * np.repeat(scales, 32, axis=-1)
    return x.astype(np.float16 if kv_element == "f16" else np.float32).astype(np.float64)


def kv_write(
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    positions: NDArray[np.int32],
    pages: Sequence[Sequence[Views]],
    row_of: NDArray[np.int32],
) -> None:
    """Store k [tokens, kv_heads, k_dim] and v [tokens, kv_heads, v_dim] into the page views
    `pages[row][page]`."""
    for t, (position, row) in enumerate(zip(positions, row_of, strict=True)):
        page_tokens = pages[row][0][1].shape[1]
        keys, values, *scales = pages[row][position // page_tokens]
        at = position % page_tokens
        if scales:
            key, scales[0][..., at] = quantize_q8_0(k[t])
            keys[:, :, at] = key.reshape(len(key), -1, 4)
            values[:, at], scales[1][..., at] = quantize_q8_0(v[t])
            continue
        with np.errstate(over="ignore"):
            keys[:, :, at] = k[t]
            values[:, at] = v[t]
