"""GGUF files of llama-shaped models with random weights, of any size, a matrix at a time.

Engines read the same bytes at the same speed whatever they mean, so a table of rates needs no
trained model. Weights are scaled so that hidden states stay finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from numpy.typing import NDArray

FLOAT16_FIELDS: dict[GGMLQuantizationType, dict[int, float]] = {
    GGMLQuantizationType.Q4_0: {0: 1 / 4.6},
    GGMLQuantizationType.Q8_0: {0: 1 / 74},
    GGMLQuantizationType.Q4_K: {0: 1 / 143, 2: 7.5 / 143},
    GGMLQuantizationType.Q6_K: {208: 1 / 1365},
}
"""By weight type: where a block's scales lie (bytes), and what each is in matrices of deviation 1.
The other bytes of a block are random: quants, and 6- or 8-bit scales of sub-blocks."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of a llama."""

    blocks: int = 16
    width: int = 2048
    ffn_width: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 32_000
    context: int = 8192

    @property
    def head_width(self) -> int:
        return self.width // self.heads


ONE_BILLION = Shape()
"""1.04 billion weights with a head of its own: about 600 MB in Q4_K."""


def write(path: Path, shape: Shape, weight_type: GGMLQuantizationType, seed: int = 1) -> None:
    """Write one model, every matrix in `weight_type`."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random {weight_type.name}")
    writer.add_block_count(shape.blocks)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_quantization_version(2)
    _add_vocabulary(writer, shape.vocab)
    for name, (rows, cols) in _matrices(shape).items():
        writer.add_tensor(name, _matrix(rows, cols, weight_type, rng), raw_dtype=weight_type)
    for name in _gains(shape):
        writer.add_tensor(name, np.ones(shape.width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    kv_width = shape.kv_heads * shape.head_width
    of_block = {
        "attn_q": (shape.width, shape.width),
        "attn_k": (kv_width, shape.width),
        "attn_v": (kv_width, shape.width),
        "attn_output": (shape.width, shape.width),
        "ffn_gate": (shape.ffn_width, shape.width),
        "ffn_up": (shape.ffn_width, shape.width),
        "ffn_down": (shape.width, shape.ffn_width),
    }
    return {
        "token_embd.weight": (shape.vocab, shape.width),
        "output.weight": (shape.vocab, shape.width),
        **{
            f"blk.{block}.{name}.weight": size
            for block in range(shape.blocks)
            for name, size in of_block.items()
        },
    }


def _gains(shape: Shape) -> list[str]:
    of_block = ("attn_norm", "ffn_norm")
    blocks = range(shape.blocks)
    return ["output_norm.weight", *(f"blk.{b}.{n}.weight" for b in blocks for n in of_block)]


def _matrix(
    rows: int, cols: int, weight_type: GGMLQuantizationType, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """(rows, bytes of a row) of random blocks; deviation of a weight about 1/sqrt(cols)."""
    group, size = gguf.GGML_QUANT_SIZES[weight_type]
    data = np.frombuffer(rng.bytes(rows * cols // group * size), np.uint8).copy()
    blocks = data.reshape(-1, size)
    for offset, value in FLOAT16_FIELDS[weight_type].items():
        scale = np.array([value / np.sqrt(cols)], np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8)
    return data.reshape(rows, -1)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    num_words = size - len(tokens)
    tokens += [b"\xe2\x96\x81w%d" % i for i in range(num_words)]
    types += [TokenType.NORMAL] * num_words
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(num_words)])
    writer.add_token_types([int(t) for t in types])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
