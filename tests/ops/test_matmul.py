"""Matrix products: every format, shape and tier against the reference, and against each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import PLAIN, Tier, available
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.matmul.reference import (
    dequantise,
    matmul,
    peaks,
    random_tiles,
    read_integers,
    tile_dtype,
)
from jitllm.kernels.op import Buffer, Element, Rows, Weight
from jitllm.kernels.quantize.reference import quantize
from jitllm.kernels.sample import PEAK_ONLY, RECORD_BYTES, WANT_LOGPROB, Field, Sample
from tests.ops.harness import PRODUCTS_HERE, PRODUCTS_RUNNABLE, Guarded, Rig

BIAS = Weight("bias", 0, FormatCode.F32, 0, 0)


@dataclass(frozen=True)
class Case:
    """One product: [tokens, cols] times [rows, cols] transposed."""

    format: FormatCode
    rows: int
    cols: int
    tokens: int
    bias: bool = False
    add: str = ""
    """Name of the residual buffer: "" for none, "dst" to add in place."""
    of: Rows = Rows.TOKENS
    seed: int = 1
    scale: float = 1.0

    def __str__(self) -> str:
        parts = [f"{self.format.name}-{self.tokens}x{self.cols}x{self.rows}"]
        parts += ["bias"] * self.bias + [f"add-{self.add}"] * bool(self.add)
        parts += ["scaled"] * (self.scale != 1)
        return "-".join([*parts, *["outputs"] * (self.of is Rows.OUTPUTS)])

    @property
    def is_quantized(self) -> bool:
        """The activations are records."""
        return FORMATS[self.format].is_quantized


@dataclass(frozen=True)
class Data:
    """What a case multiplies."""

    weight: bytes
    src: NDArray[Any]
    x: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    add: NDArray[np.float32] | None


def data_of(case: Case) -> Data:
    """Random weights and activations; a row's activations do not depend on how many there are."""
    rng = np.random.default_rng(case.seed)
    weight = random_tiles(FORMATS[case.format], case.rows, case.cols, rng)
    bias = rng.standard_normal(case.rows).astype(np.float32)
    x, add = (rng.standard_normal((100, n)).astype(np.float32) for n in (case.cols, case.rows))
    x[:, ::7] *= 10
    x, add = x[: case.tokens], add[: case.tokens]
    src = quantize(x) if case.is_quantized else x
    return Data(weight, src, x, bias if case.bias else None, add if case.add else None)


def run(case: Case, tier: Tier, pieces: int = 1, data: Data | None = None) -> NDArray[np.float32]:
    """The product as the tier computes it, f32 [tokens, rows]."""
    data = data or data_of(case)
    element = Element.Q8 if case.is_quantized else Element.F32
    src = Buffer("src", case.cols, case.of, element)
    dst = Buffer("dst", case.rows, case.of)
    weight = Weight("matrix", 0, case.format, case.rows, case.cols)
    arrays = {"src": data.src}
    weights = {("matrix", 0): data.weight}
    if data.add is not None:
        arrays[case.add] = data.add
    if data.bias is not None:
        weights["bias", 0] = data.bias.tobytes()
    rig = Rig(
        # The other count is larger, so that a kernel that takes the wrong one runs over a guard.
        num_tokens=case.tokens + 1 if case.of is Rows.OUTPUTS else case.tokens,
        num_outputs=case.tokens if case.of is Rows.OUTPUTS else case.tokens + 1,
        arrays=arrays,
        weights=weights,
    )
    op = MatMul(
        src,
        dst,
        weight,
        replace(BIAS, cols=case.rows) if case.bias else None,
        Buffer(case.add, case.rows, case.of) if case.add else None,
        case.scale,
    )
    rig.run(op, tier, pieces)
    return rig.value("dst")


SHAPES = [
    # rows, cols, tokens: whole and ragged tiles, every block of rows, one and two panels
    (16, 256, 1),
    (40, 512, 15),
    (7, 256, 2),
    (64, 768, 67),
]
CASES = [
    *(Case(f, *shape) for f in FormatCode for shape in SHAPES),
    *(Case(f, 37, 256, 3, bias=True, add="residual") for f in FormatCode),
    *(Case(f, 32, 256, 5, add="dst") for f in FormatCode),
    *(Case(f, 24, 256, 66, add="dst") for f in FormatCode),
    *(Case(f, 21, 512, 3, bias=True) for f in FormatCode),
    *(Case(f, 24, 256, 66, of=Rows.OUTPUTS) for f in FormatCode),
    # Rows that end within a super-group, or within a group.
    *(Case(f, 19, 96, 4) for f in FormatCode if FORMATS[f].col_multiple <= 32),
    *(Case(f, 19, 45, 4) for f in FormatCode if not FORMATS[f].is_quantized),
    # Rows that end within a chunk, and a last tile that has no neighbour.
    *(Case(f, 80, 416, 30, bias=True) for f in FormatCode if FORMATS[f].col_multiple <= 32),
    Case(FormatCode.Q4_K, 48, 2048, 9, bias=True, add="residual"),
    *(Case(f, 37, 256, 3, True, "dst", scale=0.22) for f in (FormatCode.F32, FormatCode.Q8_0)),
    # So large that it is written past the caches.
    *(Case(f, 32_021, 32, 67, True, "dst") for f in (FormatCode.F32, FormatCode.Q8_0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tier_gives_the_reference_and_the_same_bits(case: Case) -> None:
    """The reference rounds as the contract says, but for rare double rounding in its fma."""
    data = data_of(case)
    shape = (case.rows, case.cols)
    expected = matmul(case.format, data.weight, *shape, data.src, data.bias, data.add, case.scale)
    plain = run(case, PLAIN, data=data)
    assert np.abs(plain - expected).max() <= 2e-6 * np.abs(expected).max()
    assert (plain == expected).mean() >= 0.99
    for tier in PRODUCTS_RUNNABLE[1:]:
        native = run(case, tier, data=data)
        assert (native.view(np.int32) == plain.view(np.int32)).all(), tier.name


@pytest.mark.parametrize("format", FormatCode, ids=lambda f: f.name)
def test_product_is_near_exact_arithmetic(format: FormatCode) -> None:
    """Only the 8 bits of the activations separate it from f64: a wrong formula would be far."""
    case = Case(format, 48, 1024, 4)
    data = data_of(case)
    weights = dequantise(format, data.weight, case.rows, case.cols).astype(np.float64)
    exact = data.x.astype(np.float64) @ weights.T
    error = run(case, available()[-1], data=data) - exact
    allowed = 0.02 if case.is_quantized else 1e-6
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < allowed


@pytest.mark.parametrize("tier", PRODUCTS_HERE)
@pytest.mark.parametrize("format", FormatCode, ids=lambda f: f.name)
def test_a_row_does_not_depend_on_its_company(format: FormatCode, tier: Tier) -> None:
    """One row alone, in small blocks and among 70 others: the same bits."""
    case = Case(format, 40, 512, 71, bias=True, add="residual")
    data = data_of(case)
    together = run(case, tier, data=data)
    assert data.add is not None
    for start, stop in ((0, 1), (3, 5), (20, 23), (30, 35), (40, 47), (57, 71)):
        part = replace(data, src=data.src[start:stop], add=data.add[start:stop])
        alone = run(replace(case, tokens=stop - start), tier, data=part)
        assert (alone.view(np.int32) == together[start:stop].view(np.int32)).all()


@pytest.mark.parametrize("tier", PRODUCTS_HERE)
@pytest.mark.parametrize("tokens", range(1, 19))
@pytest.mark.parametrize("format", [FormatCode.Q4_K, FormatCode.Q6_K, FormatCode.Q8_0],
                         ids=lambda f: f.name)  # fmt: skip
def test_any_number_of_rows_gives_the_same_bits(
    format: FormatCode, tokens: int, tier: Tier
) -> None:
    """However they are cut into blocks, the last of which may lack a row."""
    most = Case(format, 39, 512, 18, bias=True, add="residual")
    data = data_of(most)
    assert data.add is not None
    part = replace(data, src=data.src[:tokens], add=data.add[:tokens])
    got = run(replace(most, tokens=tokens), tier, data=part)
    assert (got.view(np.int32) == run(most, tier, data=data)[:tokens].view(np.int32)).all()


@pytest.mark.parametrize("tier", PRODUCTS_HERE)
@pytest.mark.parametrize("format", [FormatCode.F16, FormatCode.Q5_0, FormatCode.Q6_K],
                         ids=lambda f: f.name)  # fmt: skip
@pytest.mark.parametrize("pieces", [2, 3, 11])
def test_pieces_do_not_matter(format: FormatCode, tier: Tier, pieces: int) -> None:
    """Items cut anywhere, across tiles and panels."""
    case = Case(format, 55, 256, 70, add="dst")
    whole, cut = run(case, tier), run(case, tier, pieces)
    assert (whole.view(np.int32) == cut.view(np.int32)).all()


@pytest.mark.parametrize("tier", PRODUCTS_HERE)
@pytest.mark.parametrize(
    "format", [f for f in FormatCode if FORMATS[f].is_quantized], ids=lambda f: f.name
)
def test_extreme_integers_do_not_saturate(format: FormatCode, tier: Tier) -> None:
    """All weights largest or smallest, all activations at +-127: the sums are exact."""
    case = Case(format, 16, 256, 4)
    fmt = FORMATS[format]
    data = data_of(case)
    raw = np.frombuffer(data.weight, np.uint8).copy()
    records = raw.view(tile_dtype(fmt))
    groups = records["groups"] if fmt.super_cols else records
    x = np.ones((4, 256), np.float32) * np.array([1, -1, 1, 1], np.float32)[:, None]
    x[2, ::2] = -1
    x[3, 16:32] = -1
    for fill in (0xFFFFFFFF, 0):
        for plane in range(len(fmt.planes)):
            groups[f"plane{plane}"] = fill
        extreme = replace(data, weight=raw.tobytes(), src=quantize(x))
        q = read_integers(fmt, extreme.weight, 16, 256).q
        assert (q == (((1 << fmt.bits) - 1 if fill else 0) - fmt.bias)).all()
        expected = matmul(format, extreme.weight, 16, 256, extreme.src)
        got = run(case, tier, data=extreme)
        assert np.abs(got - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("tier", PRODUCTS_HERE)
@pytest.mark.parametrize("format", [FormatCode.F16, FormatCode.Q8_0], ids=lambda f: f.name)
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 67])
@pytest.mark.parametrize("vocab", [1, 40, 2048, 2049, 5003])
def test_an_output_head_finds_its_peaks(
    vocab: int, tokens: int, format: FormatCode, tier: Tier
) -> None:
    """Of every slice the first of its largest, whatever numbers, ties and infinities there are; and
    rows of which nothing else is read are not written."""
    rng = np.random.default_rng(vocab * 100 + tokens)
    logits = rng.standard_normal((tokens, vocab)).astype(np.float32)
    for row, x in enumerate(logits):
        ids = rng.integers(0, vocab, 9)
        match row % 6:
            case 1:
                x[ids] = 9.0
            case 2:
                x[ids], x[: vocab // 2] = np.inf, np.nan
            case 3:
                x[:] = np.nan if row % 4 else -np.inf
            case 4:
                x[:] = -np.inf
                x[ids] = np.nan
            case 5:
                x[:], x[ids] = -abs(x), 0.0
    flags = rng.integers(0, 2, tokens) if tokens > 1 else np.zeros(1, int)
    records = Guarded(tokens * RECORD_BYTES)
    records.view[:] = 0
    records.view.reshape(tokens, -1)[:, Field.FLAGS] = flags * PEAK_ONLY + WANT_LOGPROB
    case = Case(format, vocab, 32, tokens, of=Rows.OUTPUTS)
    data = data_of(case)
    rig = Rig(
        num_tokens=tokens + 1,
        num_outputs=tokens,
        arrays={"src": data.src, "add": logits},
        weights={("w", 0): bytes(len(data.weight))},  # zeros: what is added is the product
        sampling=records,
    )
    element = Element.Q8 if case.is_quantized else Element.F32
    op = MatMul(
        Buffer("src", 32, Rows.OUTPUTS, element),
        Buffer("logits", vocab, Rows.OUTPUTS),
        Weight("w", 0, format, vocab, 32),
        add=Buffer("add", vocab, Rows.OUTPUTS),
        peaks=Sample.peaks_buffer("peaks"),
    )
    rig.run(op, tier, pieces=3)
    assert rig.value("peaks").tobytes() == peaks(logits).tobytes()
    written = rig.value("logits")
    assert np.isnan(written[flags == 1]).all()
    assert np.array_equal(written[flags == 0], logits[flags == 0], equal_nan=True)


def test_layout_puts_weights_where_the_pictures_say() -> None:
    """Spot checks of the bit planes, written out by hand."""
    fmt = FORMATS[FormatCode.Q6_K]
    raw = np.zeros(fmt.tile_bytes(256), np.uint8)
    group = fmt.super_header_bytes + 2 * fmt.group_bytes
    # Weight 13 of row 3 in group 2. 4-bit plane: word 1, byte 1, high nibble (13 = 8 + 4 + 1).
    raw[group + 64 + 3 * 4 + 1] = 0xB0
    # 2-bit plane: word 0, byte 1, bits 6..7 (13 = 4 * 3 + 1).
    raw[group + fmt.plane_offset(1) + 3 * 4 + 1] = 0b10 << 6
    q = read_integers(fmt, raw.tobytes(), 16, 256).q.reshape(16, 256) + fmt.bias
    assert q[3, 2 * 32 + 13] == 0x2B
    assert np.count_nonzero(q) == 1

    fmt = FORMATS[FormatCode.Q5_0]
    raw = np.zeros(fmt.tile_bytes(64), np.uint8)
    # Weight 22 of row 15 in group 1. 1-bit plane: byte 2, bit 5 (22 = 4 * 5 + 2).
    raw[fmt.group_bytes + fmt.plane_offset(1) + 15 * 4 + 2] = 1 << 5
    q = read_integers(fmt, raw.tobytes(), 16, 64).q.reshape(16, 64) + fmt.bias
    assert q[15, 32 + 22] == 16
    assert np.count_nonzero(q) == 1


@pytest.mark.parametrize("format", FormatCode, ids=lambda f: f.name)
def test_record_types_are_as_long_as_the_layout(format: FormatCode) -> None:
    """The reader's record type and the layout's arithmetic agree on every size."""
    fmt = FORMATS[format]
    assert tile_dtype(fmt).itemsize == fmt.tile_bytes(fmt.super_cols or 32)
