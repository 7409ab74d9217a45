"""Mixtures of experts: memory, threads, tiers and neighbours change no bit of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitllm.engine import Request, Sampling
from jitllm.errors import BadSource
from jitllm.formats.convert import plan
from jitllm.formats.jlm import Container
from jitllm.jit.tiers import available
from jitllm.text.vocabulary import VocabularyData
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.native import opened, replies, reply
from tests.oracle import make_models

MODELS = [("qwen2moe", "f32"), ("bailingmoe2", "f32"), ("qwen3moe", "q4_0"), ("deepseek", "q8_0")]
"""A gated shared expert, groups, quantised experts, and a dense block before quantised ones."""


@pytest.mark.parametrize(("name", "weight_type"), MODELS)
async def test_tiers_and_threads_change_nothing(
    name: str, weight_type: str, tiny_model: TinyModel
) -> None:
    tokens = tuple(oracle.golden(name)[0].tolist())
    request = Request(tokens, max_tokens=6, logprobs=True)
    found = {}
    for tier, threads in ((tier.name, threads) for tier in available() for threads in (1, 3)):
        async with opened(tiny_model(name, weight_type), tier=tier, threads=threads) as model:
            found[tier, threads] = (await reply(model.engine, request)).bits
    assert len(set(found.values())) == 1, found.keys()


@pytest.mark.parametrize(("name", "weight_type"), MODELS)
async def test_a_budget_of_one_block_changes_nothing(
    name: str, weight_type: str, tiny_model: TinyModel
) -> None:
    """A block comes with all its experts: what is read is what all the blocks take."""
    path = tiny_model(name, weight_type)
    request = Request(tuple(range(5, 25)), max_tokens=8)
    async with opened(path, experts="blocks", read_ahead="off") as model:
        whole = await reply(model.engine, request)
        fixed = (await model.engine.stats()).pages.fixed_bytes
    budget = fixed + largest(path)
    async with opened(path, experts="blocks", read_ahead="off", maxmem_bytes=budget) as model:
        before = (await model.engine.stats()).pages
        tight = await reply(model.engine, request)
        after = (await model.engine.stats()).pages
    assert tight.bits == whole.bits
    assert after.page_ins - before.page_ins >= 8 * 3 - 1
    per_block = (after.bytes_read - before.bytes_read) / (after.page_ins - before.page_ins)
    assert min(frame_bytes(path)) <= per_block < largest(path) + 4096


def largest(path: Path) -> int:
    return max(frame_bytes(path))


def frame_bytes(path: Path) -> tuple[int, ...]:
    """Of each block with its experts."""
    with Container.open(path) as container:
        return container.header.frame_bytes


async def test_neighbours_change_nothing(tiny_model: TinyModel) -> None:
    """Whatever experts they go to: some prompts of many lengths, alone and all at once."""
    requests = [
        Request(
            tuple((7 * i + j) % 300 + 5 for j in range(3 + 17 * i)),
            max_tokens=5,
            sampling=Sampling(temperature=0.8, seed=i),
        )
        for i in range(7)
    ]
    async with opened(tiny_model("qwen3moe", "q8_0")) as model:
        alone = [(await reply(model.engine, request)).bits for request in requests]
        together = [found.bits for found in await replies(model.engine, requests)]
    assert together == alone


# --- what files keep as one ----------------------------------------------------------------------


def test_fused_tensors_are_taken_apart(tiny_model: TinyModel) -> None:
    source = oracle.model("bailingmoe2")
    with Container.open(tiny_model("bailingmoe2")) as container:
        entries = {(t.role, t.block): t for t in container.header.tensors}
    assert not any(role.startswith("attn_qkv") for role, _ in entries)
    for role, rows in (("attn_q", 256), ("attn_k", 128), ("attn_v", 128)):
        assert entries[role, 1].rows == rows
        assert source.values[role, 1].shape == (rows, 256)


def test_a_fused_tensor_of_another_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = make_models.specs()
    specs["bailingmoe2"]["tensors"]["blk.1.attn_qkv.weight"] = [256, 513]
    monkeypatch.setattr(make_models, "specs", lambda: specs)
    make_models.write("bailingmoe2", tmp_path / "x.gguf")
    match = "'blk.1.attn_qkv.weight' has 513 rows, not 256 [+] 128 [+] 128"
    with pytest.raises(BadSource, match=match):
        plan(tmp_path / "x.gguf", read_vocabulary=VocabularyData.from_gguf)


def test_banks_of_different_sizes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = make_models.specs()
    specs["llama-moe"]["tensors"]["blk.1.ffn_up_exps.weight"] = [256, 64, 7]
    monkeypatch.setattr(make_models, "specs", lambda: specs)
    make_models.write("llama-moe", tmp_path / "x.gguf")
    with pytest.raises(BadSource, match=r"has shape \[7, 64, 256\], not \[8, 64, 256\]"):
        plan(tmp_path / "x.gguf", read_vocabulary=VocabularyData.from_gguf)
