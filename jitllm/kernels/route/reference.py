"""Routing in NumPy, for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jitllm.kernels.route import LEAST_SUM

F32s = NDArray[np.float32]


def route(
    logits: F32s,
    used: int,
    score: str,
    bias: F32s | None = None,
    groups: int = 1,
    groups_used: int = 1,
    is_normalised: bool = False,
    scale: float = 1.0,
) -> tuple[NDArray[np.int32], F32s]:
    """Chosen experts i32 [tokens, used] and their weights f32 [tokens, used] of finite logits."""
    x = logits.astype(np.float64)
    if score == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        p = e / e.sum(-1, keepdims=True)
    else:
        p = 1 / (1 + np.exp(-x))
    choice = p if bias is None else p + bias
    if groups > 1:
        runs = choice.reshape(len(x), groups, -1)
        best_two = np.sort(runs, axis=-1)[..., -2:].sum(-1)
        out = np.argsort(-best_two, axis=-1, kind="stable")[:, groups_used:]
        runs = runs.copy()
        np.put_along_axis(runs, out[..., None], -np.inf, axis=1)
        choice = runs.reshape(x.shape)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, :used]
    weights = np.take_along_axis(p, ids, axis=-1)
    if is_normalised:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), LEAST_SUM)
    return ids.astype(np.int32), (weights * scale).astype(np.float32)
