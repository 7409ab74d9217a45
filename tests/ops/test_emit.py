"""What the expression layer promises beyond arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from jitllm.jit.emit import Kernel, i64
from jitllm.jit.tiers import Tier
from tests.ops.arena import shared
from tests.ops.harness import HERE, piece, uncached


@pytest.mark.parametrize("tier", HERE)
def test_an_opaque_integer_is_the_integer(tier: Tier) -> None:
    """Whatever it was computed from, and however often it is used."""

    def body(k: Kernel) -> None:
        out, step = k.params[0], k.params[1]
        for i in range(3):
            row = k.opaque(out + step * i)
            k.store(row, row)
            k.store(row + 8, row + 8)

    words = shared(np.zeros(6, np.int64))
    home = uncached(tier)  # the code lives as long
    _, call = piece(home, "opaque", body)
    call(words.ctypes.data, 16, 0, 0)
    assert words.tolist() == [words.ctypes.data + 8 * i for i in range(6)]


@pytest.mark.parametrize("tier", HERE)
def test_any_address_may_be_prefetched(tier: Tier) -> None:
    """Also one where there is no memory, as after a matrix at the end of an arena."""

    def body(k: Kernel) -> None:
        for address in (0, -64, 1 << 40):
            k.prefetch(k.const(address))
            k.prefetch(k.params[0] + address)
        k.store(k.load(k.params[0], i64) + 1, k.params[0])

    words = shared(np.full(1, 41, np.int64))
    home = uncached(tier)
    _, call = piece(home, "prefetch", body)
    call(words.ctypes.data, 0, 0, 0)
    assert words.tolist() == [42]
