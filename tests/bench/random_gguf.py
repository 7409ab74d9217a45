"""Models of random weights, of any size: what they cost is of interest, not what they say.

A llama, or a mixture. Blocks have the same noise for weights and differ in their routers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from jitllm.formats.convert import convert
from jitllm.text.vocabulary import VocabularyData
from tests.oracle.make_models import add_vocabulary

Q4_0, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K

FLOAT16_FIELDS: dict[GGMLQuantizationType, dict[int, float]] = {
    Q4_0: {0: 1 / 4.6},
    Q8_0: {0: 1 / 74},
    Q4_K: {0: 1 / 4.6 / 32, 2: 7.5 / 4.6 / 32},
    Q6_K: {208: 1 / 1365},
}
"""By weight type: where scales of a group lie (bytes), and what each is where weights have a
deviation of 1. All else is random: quants, and the 8-bit scales of Q6_K."""

EQUAL_SCALES = bytes([0xA0] * 8 + [0] * 4)
"""Scales and minima of Q4_K, 6 bits each, all 32: a weight is 32 * (q - 7.5) * scale."""


@dataclass(frozen=True)
class Shape:
    """A dense model, or with `experts` a mixture; `ffn_width` is that of one expert then."""

    blocks: int
    ffn_width: int
    experts: int = 0
    used: int = 0
    width: int = 2048
    heads: int = 16
    kv_heads: int = 4
    head_width: int = 128
    vocab: int = 4096
    weight_type: GGMLQuantizationType = Q4_K

    @property
    def arch(self) -> str:
        """A row that has it."""
        return "qwen3moe" if self.experts else "llama"

    @property
    def feed_forward_bytes(self) -> int:
        """Of the matrices of one block, or of one expert."""
        group, size = gguf.GGML_QUANT_SIZES[self.weight_type]
        return 3 * self.width * self.ffn_width // group * size


def write_models(folder: Path, shape: Shape) -> tuple[Path, Path]:
    """A model as GGUF, and as a container."""
    source, container = folder / "model.gguf", folder / "model.jlm"
    write_gguf(source, shape)
    convert(source, container, read_vocabulary=VocabularyData.from_gguf)
    return source, container


def write_gguf(path: Path, shape: Shape) -> None:
    """One model as GGUF."""
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"random {shape.weight_type.name}")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.blocks)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(1e6)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.ffn_width)
    add_vocabulary(writer, shape.vocab)
    # Large, so that hidden states differ from token to token and routers choose differently.
    _matrix(writer, shape, "token_embd", shape.vocab, shape.width, std=4.0)
    _matrix(writer, shape, "output", shape.vocab, shape.width)
    _gain(writer, "output_norm", shape.width)
    for block in range(shape.blocks):
        _block(writer, f"blk.{block}", shape)
        _feed_forward(writer, f"blk.{block}", block, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _block(writer: gguf.GGUFWriter, prefix: str, shape: Shape) -> None:
    q_width, kv_width = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    for role in ("attn_norm", "ffn_norm"):
        _gain(writer, f"{prefix}.{role}", shape.width)
    if shape.experts:
        for role in ("attn_q_norm", "attn_k_norm"):
            _gain(writer, f"{prefix}.{role}", shape.head_width)
    for role, rows, cols in (
        ("attn_q", q_width, shape.width),
        ("attn_k", kv_width, shape.width),
        ("attn_v", kv_width, shape.width),
        ("attn_output", shape.width, q_width),
    ):
        _matrix(writer, shape, f"{prefix}.{role}", rows, cols)


def _feed_forward(writer: gguf.GGUFWriter, prefix: str, block: int, shape: Shape) -> None:
    end = "_exps" if shape.experts else ""
    for role, rows, cols in (
        ("ffn_gate", shape.ffn_width, shape.width),
        ("ffn_up", shape.ffn_width, shape.width),
        ("ffn_down", shape.width, shape.ffn_width),
    ):
        _matrix(writer, shape, f"{prefix}.{role}{end}", rows, cols, shape.experts)
    if shape.experts:
        dice = np.random.default_rng(block)
        router = dice.standard_normal((shape.experts, shape.width), np.float32)
        writer.add_tensor(f"{prefix}.ffn_gate_inp.weight", router * np.float32(shape.width**-0.5))


def _gain(writer: gguf.GGUFWriter, name: str, size: int) -> None:
    writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))


def _matrix(
    writer: gguf.GGUFWriter,
    shape: Shape,
    name: str,
    rows: int,
    cols: int,
    experts: int = 0,
    std: float = 0.0,
) -> None:
    noise = _noise(max(experts, 1), rows, cols, std or cols**-0.5, shape.weight_type)
    value = noise if experts else noise[0]
    writer.add_tensor(f"{name}.weight", value, raw_dtype=shape.weight_type)


@cache
def _noise(
    experts: int, rows: int, cols: int, std: float, weight_type: GGMLQuantizationType
) -> NDArray[np.uint8]:
    """[experts, rows, bytes of a row]: random weights around zero with deviation `std`."""
    group, size = gguf.GGML_QUANT_SIZES[weight_type]
    rng = np.random.default_rng([experts, rows, cols])
    groups = rng.integers(0, 256, (experts, rows, cols // group, size), np.uint8)
    if weight_type is Q4_K:
        groups[..., 4:16] = np.frombuffer(EQUAL_SCALES, np.uint8)
    for offset, value in FLOAT16_FIELDS[weight_type].items():
        scale = np.float16(value * std)
        groups[..., offset : offset + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return groups.reshape(experts, rows, -1)
