"""Quantised activations in NumPy, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitllm.kernels.layout import (
    ACT_NEG_ISUM,
    ACT_NEG_ISUM_HI,
    ACT_NEG_ISUM_LO,
    ACT_RECORD_BYTES,
    ACT_SCALE,
    ACT_SUM,
    ACT_SUM_HI,
    ACT_SUM_LO,
    GROUP,
)

_HALF = GROUP // 2
RECORD = np.dtype(
    {
        "names": ["q", "scale", "sum", "neg", "neg_lo", "neg_hi", "sum_lo", "sum_hi"],
        "formats": [("i1", GROUP), "<f4", "<f4", "<i4", "<i4", "<i4", "<f4", "<f4"],
        "offsets": [
            0,
            ACT_SCALE,
            ACT_SUM,
            ACT_NEG_ISUM,
            ACT_NEG_ISUM_LO,
            ACT_NEG_ISUM_HI,
            ACT_SUM_LO,
            ACT_SUM_HI,
        ],
        "itemsize": ACT_RECORD_BYTES,
    }
)
"""The 64-byte record of one group of 32."""


def quantize(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Records uint8 [rows, groups * 64] of finite f32 [rows, width]."""
    rows, width = x.shape
    groups = -(-width // GROUP)
    values = np.zeros((rows, groups * GROUP), np.float32)
    values[:, :width] = x
    values = values.reshape(rows, groups, GROUP)
    bound = np.float32(127)
    amax = np.abs(values).max(axis=-1)
    scale = amax / bound
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(amax == 0, np.float32(0), bound / amax)
        scaled = values * inverse[..., None]
    # 127 / amax overflows where amax is below 4e-37: a zero times infinity then counts as -127.
    scaled = np.where(scaled > -bound, scaled, -bound)
    q = np.rint(np.where(scaled < bound, scaled, bound)).astype(np.int32)
    records: NDArray[Any] = np.zeros((rows, groups), RECORD)
    records["q"], records["scale"] = q, scale
    for suffix, part in (("", q), ("_lo", q[..., :_HALF]), ("_hi", q[..., _HALF:])):
        total = part.sum(axis=-1)
        records[f"neg{suffix}"] = -total
        records[f"sum{suffix}"] = total.astype(np.float32) * scale
    return records.view(np.uint8).reshape(rows, groups * ACT_RECORD_BYTES)
