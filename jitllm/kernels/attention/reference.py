"""Attention in NumPy, in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def attention(
    q: NDArray[np.float32],
    keys: NDArray[Any],
    values: NDArray[Any],
    position: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> NDArray[np.float64]:
    """One token: q [heads, k_dim], keys [kv_heads, positions, k_dim], values [kv_heads, positions,
    v_dim] of its sequence; returns [heads, v_dim]."""
    start = max(position + 1 - window, 0) if window else 0
    group = len(q) // len(keys)
    k = np.repeat(keys[:, start : position + 1], group, axis=0).astype(np.float64)
    v = np.repeat(values[:, start : position + 1], group, axis=0).astype(np.float64)
    scores = np.einsum("hd,hjd->hj", q, k) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    attended: NDArray[np.float64] = np.einsum("hj,hjd->hd", weights, v)
    return attended
