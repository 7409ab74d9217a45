"""Models of random Q4_K weights, of any size: what they cost is of interest, not what they say."""

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

WIDTH, HEAD_DIM, HEADS, KV_HEADS, VOCAB = 2048, 128, 16, 4, 4096
GROUP, GROUP_BYTES = 256, 144  # of Q4_K


@dataclass(frozen=True)
class Shape:
    """A dense model, or with `experts` a mixture; `ffn_width` is that of one expert then."""

    blocks: int
    ffn_width: int
    experts: int = 0
    used: int = 0

    @property
    def arch(self) -> str:
        """A row that has it."""
        return "qwen3moe" if self.experts else "qwen3"

    @property
    def feed_forward_bytes(self) -> int:
        """Of the matrices of one block, or of one expert."""
        return 3 * WIDTH * self.ffn_width // GROUP * GROUP_BYTES


def write_models(folder: Path, shape: Shape) -> tuple[Path, Path]:
    """A model as GGUF, and as a container."""
    source, container = folder / "model.gguf", folder / "model.jlm"
    write_gguf(source, shape)
    convert(source, container, read_vocabulary=VocabularyData.from_gguf)
    return source, container


def write_gguf(path: Path, shape: Shape) -> None:
    """Blocks differ in their routers; their other weights are the same noise."""
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(shape.blocks)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.ffn_width)
    add_vocabulary(writer, VOCAB)
    # Large, so that hidden states differ from token to token and routers choose differently.
    _matrix(writer, "token_embd", VOCAB, WIDTH, std=4.0)
    _matrix(writer, "output", VOCAB, WIDTH)
    _gain(writer, "output_norm", WIDTH)
    for block in range(shape.blocks):
        prefix = f"blk.{block}"
        for role, size in (("attn_norm", WIDTH), ("ffn_norm", WIDTH)):
            _gain(writer, f"{prefix}.{role}", size)
        for role in ("attn_q_norm", "attn_k_norm"):
            _gain(writer, f"{prefix}.{role}", HEAD_DIM)
        for role, rows, cols in (
            ("attn_q", HEADS * HEAD_DIM, WIDTH),
            ("attn_k", KV_HEADS * HEAD_DIM, WIDTH),
            ("attn_v", KV_HEADS * HEAD_DIM, WIDTH),
            ("attn_output", WIDTH, HEADS * HEAD_DIM),
        ):
            _matrix(writer, f"{prefix}.{role}", rows, cols)
        _feed_forward(writer, prefix, block, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _feed_forward(writer: gguf.GGUFWriter, prefix: str, block: int, shape: Shape) -> None:
    end = "_exps" if shape.experts else ""
    for role, rows, cols in (
        ("ffn_gate", shape.ffn_width, WIDTH),
        ("ffn_up", shape.ffn_width, WIDTH),
        ("ffn_down", WIDTH, shape.ffn_width),
    ):
        _matrix(writer, f"{prefix}.{role}{end}", rows, cols, shape.experts)
    if shape.experts:
        router = np.random.default_rng(block).standard_normal((shape.experts, WIDTH), np.float32)
        writer.add_tensor(f"{prefix}.ffn_gate_inp.weight", router * np.float32(WIDTH**-0.5))


def _gain(writer: gguf.GGUFWriter, name: str, size: int) -> None:
    writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))


def _matrix(
    writer: gguf.GGUFWriter, name: str, rows: int, cols: int, experts: int = 0, std: float = 0.0
) -> None:
    noise = _noise(max(experts, 1), rows, cols, std or cols**-0.5)
    value = noise if experts else noise[0]
    writer.add_tensor(f"{name}.weight", value, raw_dtype=GGMLQuantizationType.Q4_K)


@cache
def _noise(experts: int, rows: int, cols: int, std: float) -> NDArray[np.uint8]:
    """Q4_K [experts, rows, cols]: equal scales, random weights around zero."""
    groups = np.empty((experts, rows, cols // GROUP, GROUP_BYTES), np.uint8)
    # Eight scales and minima of 6 bits, all of them 32: a weight is 32 * (q - 7.5) * scale.
    scale = np.float16(std / 4.6 / 32)
    groups[..., 0:2] = np.frombuffer(scale.tobytes(), np.uint8)
    groups[..., 2:4] = np.frombuffer(np.float16(7.5 * scale).tobytes(), np.uint8)
    groups[..., 4:12] = 0xA0
    groups[..., 12:16] = 0
    rng = np.random.default_rng([experts, rows, cols])
    groups[..., 16:] = rng.integers(0, 256, (*groups.shape[:-1], GROUP // 2), np.uint8)
    return groups.reshape(experts, rows, -1)
