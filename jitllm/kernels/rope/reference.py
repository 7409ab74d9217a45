"""Rotary embedding in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rope(
    x: NDArray[np.float32],
    table: NDArray[np.float32],
    head_dim: int,
    num_rotated: int,
    interleaved: bool,
    factors: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """Rotated [tokens, heads * head_dim] in f64. factors: [tokens], already looked up."""
    heads = x.reshape(len(x), -1, head_dim).astype(np.float64)
    half = num_rotated // 2
    first = slice(0, num_rotated, 2) if interleaved else slice(0, half)
    second = slice(1, num_rotated, 2) if interleaved else slice(half, num_rotated)
    cos, sin = table[:, None, :half], table[:, None, half:]
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * cos - b * sin
    heads[..., second] = a * sin + b * cos
    if factors is not None:
        heads *= factors[:, None, None]
    return heads.reshape(x.shape)
