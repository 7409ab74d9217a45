"""Models of any shape. Their weights are noise: only what they cost is of interest."""

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

GROUP = 32
HEAD_DIM = 64


@dataclass(frozen=True)
class Shape:
    """A llama with Q8_0 matrices; `width` is a multiple of 128, `ffn_width` of 32."""

    blocks: int = 8
    width: int = 256
    ffn_width: int = 384
    vocab: int = 320
    context: int = 512

    @property
    def block_matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns."""
        width, kv_width = self.width, self.width // 2
        return {
            "attn_q": (width, width),
            "attn_k": (kv_width, width),
            "attn_v": (kv_width, width),
            "attn_output": (width, width),
            "ffn_gate": (self.ffn_width, width),
            "ffn_up": (self.ffn_width, width),
            "ffn_down": (width, self.ffn_width),
        }


def write_container(path: Path, shape: Shape) -> Path:
    """A container of this shape at `path`."""
    source = path.with_suffix(".gguf")
    write_gguf(source, shape)
    convert(source, path, read_vocabulary=VocabularyData.from_gguf)
    source.unlink()
    return path


def write_gguf(path: Path, shape: Shape) -> None:
    """The source of such a container."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.blocks)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.width // HEAD_DIM)
    writer.add_head_count_kv(shape.width // HEAD_DIM // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    add_vocabulary(writer, shape.vocab)
    _add_matrix(writer, "token_embd.weight", shape.vocab, shape.width)
    _add_gain(writer, "output_norm.weight", shape.width)
    for block in range(shape.blocks):
        for role in ("attn_norm", "ffn_norm"):
            _add_gain(writer, f"blk.{block}.{role}.weight", shape.width)
        for role, (rows, cols) in shape.block_matrices.items():
            _add_matrix(writer, f"blk.{block}.{role}.weight", rows, cols)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gain(writer: gguf.GGUFWriter, name: str, size: int) -> None:
    writer.add_tensor(name, np.ones(size, np.float32))


def _add_matrix(writer: gguf.GGUFWriter, name: str, rows: int, cols: int) -> None:
    writer.add_tensor(name, _noise(rows, cols), raw_dtype=GGMLQuantizationType.Q8_0)


@cache
def _noise(rows: int, cols: int) -> NDArray[np.uint8]:
    """Q8_0 [rows, cols]: equal scales, random weights. The same ones for every block."""
    groups = np.empty((rows, cols // GROUP, 2 + GROUP), np.uint8)
    scale = np.float16(cols**-0.5 / 64)
    groups[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    rng = np.random.default_rng([rows, cols])
    groups[..., 2:] = np.frombuffer(rng.bytes(rows * cols), np.uint8).reshape(
        rows, cols // GROUP, GROUP
    )
    return groups.reshape(rows, -1)
