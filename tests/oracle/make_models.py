"""Writes the tiny models that `tests/data/golden` has the logits of.

    python tests/oracle/make_models.py DIRECTORY [NAME ...]

`archs.json` describes them: {name: {"arch", "kv": {key: [type, value]}, "tensors": {name: shape}}},
shapes in GGUF order, the contiguous dimension first. Every weight is a pure function of its name
and shape, so the same bytes come out everywhere; `models.sha256` has their digests.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, TokenType
from numpy.typing import NDArray

HERE = Path(__file__).parent
SEED = 1

# 64 ordinary pieces; "_" stands for the SentencePiece space mark. 3 + 256 + 61 = 320 ids.
PIECES = (
    "_ e t a o i n s r h l d u c m f p g w y b v k x j q z _t _a th he in er an re on "
    "_the _s _w _o nd ed ing _and or en is es ou _in _of _to at it ar 0 1 2 3 4 5"
)

KINDS = {
    "u32": GGUFValueType.UINT32,
    "f32": GGUFValueType.FLOAT32,
    "bool": GGUFValueType.BOOL,
    "str": GGUFValueType.STRING,
}
FILE_TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "bf16": 32}


def specs() -> dict[str, Any]:
    """Every model that can be written, by name."""
    return json.loads((HERE / "archs.json").read_text())


def write(name: str, path: Path, weight_type: str = "f32") -> None:
    """Write one model; matrices in `weight_type`: f32, or what the `gguf` package can write."""
    spec = specs()[name]
    writer = gguf.GGUFWriter(path, spec["arch"])
    # No architecture in the name: engines key quirks of vocabularies on it.
    writer.add_name(f"oracle s{SEED} {weight_type}")
    for key, (kind, value) in spec["kv"].items():
        writer.add_key_value(key, value, KINDS[kind])
    add_vocabulary(writer, spec["tensors"]["token_embd.weight"][1])
    writer.add_file_type(FILE_TYPES.get(weight_type, 0))
    writer.add_quantization_version(2)
    for tensor, shape in spec["tensors"].items():
        add_tensor(writer, tensor, shape, spec, GGMLQuantizationType[weight_type.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    shape: list[int],
    spec: dict[str, Any],
    weight_type: GGMLQuantizationType,
) -> None:
    """Add one tensor: matrices in `weight_type`; vectors, routers and odd rows in f32."""
    value = weight(name, shape, spec)
    group_size, _ = gguf.GGML_QUANT_SIZES[weight_type]
    is_plain = len(shape) == 1 or "ffn_gate_inp" in name or shape[0] % group_size
    if weight_type != GGMLQuantizationType.F32 and not is_plain:
        packed = gguf.quants.quantize(value, weight_type)
        writer.add_tensor(name, packed, raw_dtype=weight_type)
    else:
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))


def weight(name: str, shape: list[int], spec: dict[str, Any]) -> NDArray[np.float32]:
    """The values of one tensor, in NumPy's order of dimensions.

    Embeddings that a model scales are small, so that hidden states start at about 1. Final norms
    of tied models have random signs, so that greedy decoding does not echo its input, and a gain
    that keeps logits at a standard deviation of about 3.
    """
    tensors, width = spec["tensors"], spec["tensors"]["token_embd.weight"][0]
    rng = np.random.Generator(np.random.PCG64([zlib.crc32(name.encode()), SEED]))
    noise = rng.standard_normal(tuple(reversed(shape)), dtype=np.float32)
    leaf = name.split(".", 2)[2] if name.startswith("blk.") else name
    _, scale = spec["kv"].get(f"{spec['arch']}.embedding_scale", ["f32", 1.0])
    embedding_std = 1.0 / (width**0.5 if spec["arch"].startswith("gemma") else scale)
    if leaf == "rope_freqs.weight":
        return np.linspace(0, 1, shape[0]).astype(np.float32) ** 2 * np.float32(7) + np.float32(1)
    if leaf == "output_norm.weight" and "output.weight" not in tensors:
        return noise * np.float32(3.0 / (embedding_std * width**0.5))
    if leaf.endswith("norm.weight"):
        return np.float32(1) + np.float32(0.1) * noise
    if leaf.endswith("bias") or len(shape) == 1:
        return np.float32(0.1) * noise
    if leaf == "token_embd.weight":
        return noise * np.float32(embedding_std)
    fan_in = np.float32(1.0 / np.sqrt(shape[0]))
    if leaf == "output.weight":  # clear winners
        return noise * np.float32(3) * fan_in
    if leaf.startswith("ffn_gate_inp."):  # clear choices
        return noise * np.float32(2) * fan_in
    return noise * fan_in


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A small but valid SentencePiece vocabulary."""
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    scores = [0.0] * len(tokens)
    extra = [piece.replace("_", "\u2581") for piece in PIECES.split()]
    extra += [f"<extra{i}>" for i in range(max(0, size - len(tokens) - len(extra)))]
    for i, piece in enumerate(extra[: size - len(tokens)]):
        tokens.append(piece.encode())
        types.append(TokenType.NORMAL)
        is_filler = piece.startswith("<")
        scores.append(-1e4 if is_filler else float(4 * len(piece) - len(extra)) - i / 64)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens[:size])
    writer.add_token_scores(scores[:size])
    writer.add_token_types([int(t) for t in types[:size]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    writer.add_token_type_count(2)


def main() -> None:
    """Command line."""
    directory, *names = sys.argv[1:]
    Path(directory).mkdir(parents=True, exist_ok=True)
    for name in names or specs():
        write(name, Path(directory) / f"{name}.gguf")


if __name__ == "__main__":
    main()
