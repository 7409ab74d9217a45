"""Gated activations in NumPy, for tests."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def glu(gate: Floats, up: Floats, activation: str) -> Floats:
    """activation(gate) * up, f32, from f64 arithmetic."""
    x = gate.astype(np.float64)
    y: NDArray[np.float64]
    if activation == "silu":
        y = x / (1 + np.exp(-x))
    else:
        y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    out: Floats = (y * up).astype(np.float32)
    return out
