"""Tiny models, and what a trusted independent engine computes from them (`tests/oracle`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.reference import Source, load
from tests.oracle import make_models

DATA = Path(__file__).parents[1] / "data"

DENSE_MODELS = [
    *("llama", "llama-plain", "llama-bias", "llama-linear", "llama-yarn", "llama-q"),
    *("qwen2", "qwen3", "gemma3", "mistral3", "granite"),
]
MIXTURES = [
    *("llama-moe", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "deepseek", "bailingmoe"),
    *("dots1", "ernie4_5-moe", "glm4moe", "minimax-m2", "hunyuan-moe", "mellum", "bailingmoe2"),
]
FLOAT_MODELS = DENSE_MODELS + MIXTURES
WRITTEN_TYPES = ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
STORED_TYPES = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
WEIGHT_TYPES = WRITTEN_TYPES + STORED_TYPES
QUANTIZED_MIXTURES = ["llama-moe-q4_1", "qwen3moe-q4_0", "qwen3moe-q8_0"]


def model_path(name: str, directory: Path) -> Path:
    """The GGUF file of a tiny model, perhaps in a weight type ("llama-q-q4_k").

    The `gguf` package cannot write every type: those files are stored, the others are written.
    """
    stem, _, weight_type = name.rpartition("-")
    if weight_type in STORED_TYPES:
        return DATA / "quants" / f"{name}.gguf"
    path = directory / f"{name}.gguf"
    if weight_type in WRITTEN_TYPES:
        make_models.write(stem, path, weight_type)
    else:
        make_models.write(name, path)
    return path


@cache
def model(name: str) -> Source:
    """A tiny model as plain values."""
    with TemporaryDirectory() as directory:
        return load(model_path(name, Path(directory)))


def quantized(weight_type: str) -> Source:
    """`llama-q` in a weight type."""
    return model(f"llama-q-{weight_type}")


def golden(name: str) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens, and the logits that count as the truth: exact, else with exact GELU, else stock.

    name: a model, perhaps in a weight type, or a weight type of `llama-q`.
    """
    return _array(name, "tokens"), _truth(name, "logits")


def check_quantized_mixture(difference: NDArray[Any]) -> None:
    """Logits [tokens, vocab] of a quantised mixture, less the exact ones.

    A router that sees rounded rows chooses another expert where two are nearly tied, and all
    logits of such a position differ: at most three of them may, the others are as without experts.
    """
    worst = np.abs(difference).max(axis=-1)
    others = difference[worst <= 0.3]
    assert len(others) >= len(difference) - 3, worst
    assert np.sqrt((others.astype(np.float64) ** 2).mean()) <= 0.06
    assert worst.max() <= 6


def greedy(name: str) -> list[int]:
    """Ids of the greedy reply to the tokens of `golden`, by the same choice of truth."""
    return _truth(name, "greedy").tolist()


def _truth(name: str, key: str) -> NDArray[Any]:
    return next(a for suffix in ("_exact", "_ref", "") if (a := _array(name, key + suffix)).size)


def _array(name: str, key: str) -> NDArray[Any]:
    """An array of a golden file, empty if it is not there."""
    is_quantized = name in WEIGHT_TYPES or name in QUANTIZED_MIXTURES
    folder = DATA / "golden" / "quants" if is_quantized else DATA / "golden"
    with np.load(folder / f"{name}.npz") as arrays:
        return arrays[key] if key in arrays else np.empty(0)
