"""Adding up experts in NumPy, for tests."""

from __future__ import annotations

import numpy as np

from jitllm.kernels.matmul.reference import F32s, fma


def combine(src: F32s, routed: F32s, add: F32s | None = None, scale: float = 1.0) -> F32s:
    """The sum f32 [tokens, width] of f32 [tokens, used, width] under weights [tokens, used]."""
    total = np.zeros((len(src), src.shape[-1]), np.float32)
    for slot in range(src.shape[1]):
        total = fma(routed[:, slot, None], src[:, slot], total)
    total = total * np.float32(scale)
    return total if add is None else total + add
