"""Products with experts: against the reference, and bit for bit what a plain product gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import PLAIN, Tier
from jitllm.kernels.dispatch import Dispatch
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.expert_matmul.reference import expert_matmul
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.matmul.reference import random_tiles
from jitllm.kernels.op import Buffer, Element, Op, Weight
from jitllm.kernels.quantize.reference import quantize
from tests.ops.harness import PRODUCTS_HERE, PRODUCTS_RUNNABLE, Rig

F32s = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """Some tokens and their experts. has_segments: each expert of a token has its own row."""

    format: FormatCode
    rows: int = 64
    cols: int = 256
    experts: int = 6
    used: int = 2
    tokens: int = 20
    has_segments: bool = False

    def __str__(self) -> str:
        name = f"{self.format.name}-{self.tokens}x{self.cols}x{self.rows}"
        return f"{name}-{self.used}-of-{self.experts}" + "-segments" * self.has_segments


@dataclass(frozen=True)
class Data:
    """What a case multiplies. src: [tokens, segments, ...]."""

    matrices: list[bytes]
    src: NDArray[Any]
    ids: NDArray[np.int32]


def data_of(case: Case) -> Data:
    """Random experts, rows and choices; the last expert is chosen by nobody."""
    rng = np.random.default_rng(case.tokens)
    fmt = FORMATS[case.format]
    matrices = [random_tiles(fmt, case.rows, case.cols, rng) for _ in range(case.experts)]
    segments = case.used if case.has_segments else 1
    x = rng.standard_normal((case.tokens * segments, case.cols)).astype(np.float32)
    src = quantize(x) if fmt.is_quantized else x
    some = max(case.experts - 1, case.used)
    ids = np.array([rng.permutation(some)[: case.used] for _ in range(case.tokens)], np.int32)
    return Data(matrices, src.reshape(case.tokens, segments, -1), ids)


def run(case: Case, data: Data, tier: Tier, pieces: int = 1) -> F32s:
    """The products f32 [tokens, used, rows], behind the dispatch that they need."""
    tokens, segments, _ = data.src.shape
    rig = Rig(
        tokens,
        arrays={"src": data.src.reshape(tokens, -1), "ids": data.ids},
        weights={("bank", 3): b"".join(data.matrices)},
    )
    table = Dispatch.table_buffer("table", case.used)
    ids = Buffer("ids", case.used, element=Element.I32)
    weight = Weight("bank", 3, case.format, case.rows, case.cols, case.experts)
    product = ExpertMatMul(
        source("src", case, segments),
        Buffer("dst", case.used * case.rows),
        weight,
        table,
        case.used,
    )
    for op in (Dispatch(ids, table, case.experts), product):
        rig.run(op, tier, pieces)
    return rig.value("dst").reshape(tokens, case.used, case.rows)


def source(name: str, case: Case, segments: int) -> Buffer:
    element = Element.Q8 if FORMATS[case.format].is_quantized else Element.F32
    return Buffer(name, segments * case.cols, element=element)


def plain(case: Case, matrix: bytes, src: NDArray[Any], tier: Tier) -> F32s:
    """An ordinary product with one expert's matrix."""
    rig = Rig(len(src), arrays={"src": src}, weights={("matrix", 0): matrix})
    weight = Weight("matrix", 0, case.format, case.rows, case.cols)
    op: Op = MatMul(source("src", case, 1), Buffer("dst", case.rows), weight)
    rig.run(op, tier)
    return rig.value("dst")


FORMATS_HERE = [FormatCode.F32, FormatCode.BF16, FormatCode.Q4_1, FormatCode.Q8_0, FormatCode.Q6_K]
"""One of each kind, where rows and their company matter."""

SMALL = [f for f in FORMATS_HERE if FORMATS[f].col_multiple <= 32]
CASES = [
    *(Case(f) for f in FormatCode),
    *(Case(f, tokens=7, has_segments=True) for f in FORMATS_HERE),
    *(Case(f, rows=32, cols=96, tokens=1, used=4, has_segments=True) for f in SMALL),
    Case(FormatCode.Q4_K, rows=96, cols=512, experts=64, used=8, tokens=1),
    Case(FormatCode.Q8_0, experts=2, used=1, tokens=150),
    *(Case(f, rows=80, experts=3, used=1, tokens=40) for f in FORMATS_HERE),
    Case(FormatCode.F32, experts=3, used=3, tokens=70),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tier_gives_the_reference_and_the_same_bits(case: Case) -> None:
    data = data_of(case)
    rows = np.broadcast_to(data.src, (case.tokens, case.used, data.src.shape[2]))
    wanted = expert_matmul(case.format, data.matrices, case.rows, case.cols, rows, data.ids)
    got = run(case, data, PLAIN)
    assert np.abs(got - wanted).max() <= 2e-6 * np.abs(wanted).max()
    for tier in PRODUCTS_RUNNABLE[1:]:
        assert run(case, data, tier).tobytes() == got.tobytes(), tier.name


@pytest.mark.parametrize("tier", PRODUCTS_HERE)
@pytest.mark.parametrize("format", FORMATS_HERE, ids=lambda f: f.name)
def test_a_row_is_what_a_plain_product_gives(format: FormatCode, tier: Tier) -> None:
    """Whatever the expert, its other rows and how the work is cut: one arithmetic."""
    case = Case(format, experts=4, tokens=90)
    data = data_of(case)
    got = run(case, data, tier)
    assert run(case, data, tier, pieces=7).tobytes() == got.tobytes()
    for expert in range(case.experts - 1):
        tokens, slots = np.nonzero(data.ids == expert)
        alone = plain(case, data.matrices[expert], data.src[tokens, 0], tier)
        assert alone.tobytes() == got[tokens, slots].tobytes()
