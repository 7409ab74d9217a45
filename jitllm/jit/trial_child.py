"""The trial of AMX, in a process of its own: the same products as vectors give, to the last bit?

Run as a module; prints one of the words of `trial.py`. Knows the argument words of two kernels.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from random import Random
from threading import Thread

from jitllm.jit import trial
from jitllm.jit.cache import ObjectCache, default_directory
from jitllm.jit.cpu import Compiler, native
from jitllm.jit.tiers import AVX512_AMX, AVX512_VNNI
from jitllm.kernels.layout import (
    FORMATS,
    GROUP,
    TILE_ROWS,
    Format,
    FormatCode,
    activation_row_bytes,
)
from jitllm.kernels.op import Ctx, KernelSpec, f32_bits

TRIED = (FormatCode.Q4_K, FormatCode.Q6_K)
"""A format with one scale a group and mins, and one with two scales and a bias."""

NUM_TILES, COLS, NUM_TOKENS = 2, 512, 37
"""Of a product: two chunks of groups, two blocks of rows and some that are no block."""


def main() -> None:
    """Say what came of it."""
    if not trial.permit():
        print(trial.NOT_PERMITTED)
        return
    kept = ObjectCache(default_directory())
    is_equal = agree(Compiler(AVX512_AMX, kept), Compiler(AVX512_VNNI, kept))
    print(trial.EQUAL if is_equal else trial.DIFFERENT)


def agree(compiler: Compiler, reference: Compiler) -> bool:
    """Whether two tiers compute the same products, to the last bit."""
    for code in TRIED:
        random = Random(code)
        weights = b"".join(random_tile(FORMATS[code], random) for _ in range(NUM_TILES))
        x = array("f", (random.gauss(0, 1) for _ in range(NUM_TOKENS * COLS)))
        if product(compiler, code, weights, x) != product(reference, code, weights, x):
            return False
    return True


def random_tile(fmt: Format, random: Random) -> bytes:
    """A tile of 16 rows of COLS weights in a format with super-scales, all of them finite."""
    parts = []
    for _ in range(COLS // fmt.super_cols):
        num_scales = fmt.super_header_bytes // 2
        super_scales = (random.uniform(0.001, 0.1) for _ in range(num_scales))
        parts.append(struct.pack(f"<{num_scales}e", *super_scales))
        parts.append(random.randbytes(fmt.super_cols // GROUP * fmt.group_bytes))
    return b"".join(parts)


def product(compiler: Compiler, code: FormatCode, weights: bytes, x: array[float]) -> bytes:
    """f32 [NUM_TOKENS, rows]: x, f32 [NUM_TOKENS, COLS], in 8 bits, times the weights, computed in
    a thread of its own, as models are."""
    quantize = KernelSpec.of("quantize")
    matmul = KernelSpec.of("matmul", format=code.name)
    addresses = compiler.build((quantize, matmul))
    ctx = (ctypes.c_int64 * Ctx.WORDS)()
    ctx[Ctx.NUM_TOKENS] = NUM_TOKENS
    groups, rows, row_bytes = COLS // GROUP, NUM_TILES * TILE_ROWS, activation_row_bytes(COLS)
    matrix = (ctypes.c_uint8 * len(weights)).from_buffer_copy(weights)
    records = (ctypes.c_uint8 * (NUM_TOKENS * row_bytes))()
    out = (ctypes.c_float * (NUM_TOKENS * rows))()
    at = ctypes.addressof
    of_quantize = (x.buffer_info()[0], at(records), COLS * 4, row_bytes, groups)
    of_matmul = (
        *(at(records), at(out), at(matrix), 0, 0),
        *(row_bytes, rows * 4, groups, rows, NUM_TILES),
        *(int(Ctx.NUM_TOKENS), f32_bits(1.0)),
    )

    def compute() -> None:
        for spec, words, items in (
            (quantize, of_quantize, NUM_TOKENS),
            (matmul, of_matmul, NUM_TILES),
        ):
            args = (ctypes.c_int64 * len(words))(*words)
            native(addresses[spec])(at(ctx), at(args), 0, items)

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    return bytes(out)


if __name__ == "__main__":
    main()
