"""The trial of AMX, in a process of its own: the same products as vectors give, to the last bit?

Run as a module; prints one of the words of `trial.py`. Knows two ops and how they are launched.
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
from jitllm.kernels.layout import FORMATS, GROUP, TILE_ROWS, Format, FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.matmul import cpu as matmul
from jitllm.kernels.op import PANEL_TOKENS, Buffer, Const, Ctx, Element, Weight
from jitllm.kernels.quantize import Quantize
from jitllm.kernels.quantize import cpu as quantize

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
    rows = NUM_TILES * TILE_ROWS
    given = Buffer("x", COLS)
    records = Buffer("records", COLS, element=Element.Q8)
    out = Buffer("out", rows)
    matrix = Weight("matrix", None, code, rows, COLS)
    memory = {
        given.name: (ctypes.c_uint8 * (len(x) * 4)).from_buffer_copy(x),
        records.name: (ctypes.c_uint8 * (NUM_TOKENS * records.stride_bytes))(),
        out.name: (ctypes.c_uint8 * (NUM_TOKENS * out.stride_bytes))(),
        matrix.role: (ctypes.c_uint8 * len(weights)).from_buffer_copy(weights),
    }
    places = _Places({name: ctypes.addressof(array) for name, array in memory.items()})
    launches = [
        *quantize.launches(Quantize(given, records), places),
        *matmul.launches(MatMul(records, out, matrix), places),
    ]
    addresses = compiler.build(launch.kernel for launch in launches)
    ctx = (ctypes.c_int64 * Ctx.WORDS)()
    ctx[Ctx.NUM_TOKENS] = NUM_TOKENS
    ctx[Ctx.TOKEN_PANELS] = -(-NUM_TOKENS // PANEL_TOKENS)

    def compute() -> None:
        for launch in launches:
            args = (ctypes.c_int64 * len(launch.args))(*launch.args)
            items = launch.factor * ctx[launch.count]
            call = native(addresses[launch.kernel])
            call(ctypes.addressof(ctx), ctypes.addressof(args), 0, items)

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    return bytes(memory[out.name])


class _Places:
    """Where the buffers and the matrix are. An `Env` of the two ops."""

    num_blocks, page_tokens, kv_element = 1, GROUP, "f16"

    def __init__(self, addresses: dict[str, int]) -> None:
        self._addresses = addresses

    def buffer(self, buffer: Buffer) -> int:
        """Address of a buffer."""
        return self._addresses[buffer.name]

    def weight(self, weight: Weight) -> int:
        """Address of the matrix."""
        return self._addresses[weight.role]

    def const(self, const: Const) -> int:
        """There are none."""
        raise NotImplementedError

    def block_slot(self, block: int) -> int:
        """Blocks are numbered as they are."""
        return block


if __name__ == "__main__":
    main()
