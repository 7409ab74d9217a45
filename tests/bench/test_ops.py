"""Ops alone: tier against tier, and matrix products against the memory that they read.

Set JITLLM_BENCH_PAIRS to the number of pairs (10). The numbers are shown, not judged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from jitllm.jit.tiers import PLAIN, Tier, available
from jitllm.kernels.attention import Attention
from jitllm.kernels.glu import Glu
from jitllm.kernels.kv_write import page_bytes
from jitllm.kernels.kv_write.reference import page_views
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.matmul.reference import random_tiles
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Buffer, Element, Op, Weight
from jitllm.kernels.quantize import Quantize
from jitllm.kernels.quantize.reference import quantize
from tests.bench.native import Products, of_op
from tests.bench.paired import compare
from tests.ops.harness import Rig

PAIRS = int(os.environ.get("JITLLM_BENCH_PAIRS", "10"))
THREADS = 2
WIDTH, FFN_WIDTH, VOCAB = 640, 2048, 262_144
"""Gemma 3 270M's."""

HISTORY = 4096

BLOCK_BYTES = 128 << 20
"""Of the matrices that stand for a model's blocks: several times what a cache holds."""

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]

Case = Callable[[], tuple[Op, Rig]]


def product(format: FormatCode, tokens: int) -> tuple[Op, Rig]:
    """A matrix that stays in cache, times some rows."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    is_quantized = FORMATS[format].is_quantized
    source = Buffer("src", WIDTH, element=Element.Q8 if is_quantized else Element.F32)
    rig = Rig(
        tokens,
        arrays={"src": quantize(x) if is_quantized else x},
        weights={("w", 0): random_tiles(FORMATS[format], 512, WIDTH, rng)},
    )
    return MatMul(source, Buffer("dst", 512), Weight("w", 0, format, 512, WIDTH)), rig


def elementwise(name: str, tokens: int) -> tuple[Op, Rig]:
    """Rows of activations."""
    rng = np.random.default_rng(3)
    width = FFN_WIDTH if name == "glu" else WIDTH
    arrays = {n: rng.standard_normal((tokens, width)).astype(np.float32) for n in ("src", "up")}
    gain = Weight("gain", 0, FormatCode.F32, 0, width)
    rig = Rig(tokens, arrays=arrays, weights={("gain", 0): np.ones(width, np.float32).tobytes()})
    src, dst = Buffer("src", width), Buffer("dst", width)
    match name:
        case "glu":
            return Glu(src, Buffer("up", width), dst, "gelu"), rig
        case "norm":
            return Norm(src, dst, gain, 1e-6, width), rig
        case _:
            return Quantize(src, Buffer("dst", width, element=Element.Q8)), rig


def attention(kv_element: str, sequences: int, tokens: int) -> tuple[Op, Rig]:
    """The last tokens of sequences that look back at HISTORY positions, in heads like Gemma's."""
    rng = np.random.default_rng(4)
    heads, (kv_heads, dim, page_tokens) = 4, (1, 256, 64)
    layout = (kv_heads, dim, dim, page_tokens, kv_element)
    count, num_pages = sequences * tokens, HISTORY // page_tokens
    rig = Rig(
        count,
        arrays={"q": rng.standard_normal((count, heads * dim)).astype(np.float32)},
        positions=np.tile(np.arange(HISTORY - tokens, HISTORY, dtype=np.int32), sequences),
        row_of=np.repeat(np.arange(sequences, dtype=np.int32), tokens),
        num_threads=THREADS,
        page_tokens=page_tokens,
        kv_element=kv_element,
        page_bytes=page_bytes(*layout),
        num_pages=sequences * num_pages,
        tables=np.arange(sequences * num_pages).reshape(sequences, num_pages).tolist(),
    )
    for page in rig.pool:
        for view in page_views(page.view, *layout):
            view[...] = rng.integers(-127, 128, view.shape) if view.dtype == np.int8 else 0.5
    q, dst = Buffer("q", heads * dim), Buffer("dst", heads * dim)
    return Attention(q, dst, 0, heads, kv_heads, dim, dim, dim**-0.5), rig


CASES: dict[str, Case] = {
    **{
        f"matmul {format.name} x {tokens}": partial(product, format, tokens)
        for format in (FormatCode.Q4_K, FormatCode.Q6_K, FormatCode.Q8_0, FormatCode.F16)
        for tokens in (1, 8, 64)
    },
    **{
        f"{name} x {tokens}": partial(elementwise, name, tokens)
        for name in ("norm", "quantize", "glu")
        for tokens in (1, 64)
    },
}


@pytest.mark.parametrize("tier", [t for t in available() if t is not PLAIN], ids=lambda t: t.name)
@pytest.mark.parametrize("name", CASES)
def test_a_tier_against_the_one_before(name: str, tier: Tier) -> None:
    """On one thread, out of the cache."""
    before = available()[available().index(tier) - 1]
    samples, ends = zip(
        *(of_op(*CASES[name](), tier=which, threads=1) for which in (tier, before)), strict=True
    )
    try:
        for ratio in compare(*samples, PAIRS):
            print(f"\n{name}, {tier.name} against {before.name}: {ratio}")
            assert ratio.pairs == PAIRS
    finally:
        for end in ends:
            end()


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (16, 1), (4, 4)])
def test_keys_and_values_of_bytes_against_halves(sequences: int, tokens: int) -> None:
    """Of one sequence a cache holds them, of sixteen they come from memory."""
    cases = [attention(kv_element, sequences, tokens) for kv_element in ("q8_0", "f16")]
    samples, ends = zip(
        *(of_op(op, rig, available()[-1], THREADS) for op, rig in cases), strict=True
    )
    try:
        for ratio in compare(*samples, PAIRS):
            print(f"\n{sequences} sequences, {tokens} tokens of each, q8_0 against f16: {ratio}")
            assert ratio.pairs == PAIRS
    finally:
        for end in ends:
            end()


@pytest.mark.parametrize(
    ("format", "rows", "least_bytes"),
    [
        (FormatCode.Q8_0, VOCAB, 1),
        *(
            (format, FFN_WIDTH, BLOCK_BYTES)
            for format in (
                FormatCode.Q4_0,
                FormatCode.Q4_K,
                FormatCode.Q5_0,
                FormatCode.Q5_K,
                FormatCode.Q6_K,
                FormatCode.Q8_0,
            )
        ),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_weights_against_a_plain_read_loop(format: FormatCode, rows: int, least_bytes: int) -> None:
    """The output head, and block after block: its share of what two threads can read."""
    cols = WIDTH if not FORMATS[format].super_cols else 768  # super-groups are 256 columns
    products = Products(format, rows, cols, least_bytes, available()[-1], THREADS)
    try:
        for ratio in compare(products.sample, products.wall, PAIRS):
            print(
                f"\n{format.name} {rows} x {cols}, {products.num_bytes / 1e6:.0f} MB: "
                f"{ratio.a:.1f} of {ratio.b:.1f} GB/s, share {ratio.median:.0%}; {ratio}"
            )
            assert ratio.pairs == PAIRS
    finally:
        products.close()
