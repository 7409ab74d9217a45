import dataclasses
from typing import Any

import pytest

from jitllm.config import EngineConfig, Probe, ResolvedConfig, resolve
from jitllm.errors import UsageError

PROBE = Probe(num_cores=2, memory_bytes=1000, tiers=("avx2", "plain"))


def test_resolve_answers_what_was_left_open() -> None:
    assert resolve(EngineConfig(), PROBE) == ResolvedConfig(
        maxmem_bytes=800, threads=2, tier="avx2", page_size_tokens=64, fairness=0
    )


def test_resolve_keeps_what_was_chosen() -> None:
    chosen = EngineConfig(
        maxmem_bytes=0,
        threads=7,
        tier="plain",
        kv_type="f32",
        ctx_tokens=99,
        page_size_tokens=1,
        read_ahead="off",
        devices="cpu",
        prompt_chunk_tokens=7,
        fairness=0,
    )
    resolved = resolve(chosen, PROBE)
    assert dataclasses.asdict(resolved) == dataclasses.asdict(chosen)
    assert resolve(resolved, PROBE) == resolved


def test_a_tier_that_the_cpu_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(UsageError, match=r"-tier 'avx512'.*choose avx2 or plain"):
        resolve(EngineConfig(tier="avx512"), PROBE)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"threads": 0}, "-threads 0 is too small; the least is 1"),
        ({"threads": 1025}, "-threads 1025 is too large; the most is 1024"),
        ({"max_batch": 65537}, "-max-batch 65537 is too large; the most is 65536"),
        ({"fairness": -1}, "-fairness -1 is too small; the least is 0"),
        ({"fairness": 101}, "-fairness 101 is too large; the most is 100"),
        ({"maxmem_bytes": -1}, "-maxmem -1"),
        ({"ctx_tokens": 0}, "-ctx 0"),
        ({"prompt_chunk_tokens": 0}, "-prompt-chunk 0"),
        ({"page_size_tokens": 48}, "-page-size 48 is not a power of two"),
        ({"kv_type": "f8"}, "-kv-type 'f8' is not available; choose f16 or f32 or q8_0"),
        ({"read_ahead": "maybe"}, "-read-ahead 'maybe'"),
        ({"gpu_layers": -2}, "-gpu-layers -2 is too small; the least is -1"),
        ({"placement_strict": True}, "-placement-strict is about a -placement"),
        ({"kv_cache": ""}, "-kv-cache names no folder; say which, or leave it out"),
        ({"kv_budget_bytes": 1 << 20}, "-kv-budget needs a folder"),
        ({"kv_budget_bytes": -1, "kv_cache": "here"}, "-kv-budget -1 is too small"),
        ({"prefix_cache_bytes": 0}, "-kv-cache-max is about a -kv-cache"),
        ({"prefix_cache_bytes": -1, "kv_cache": "here"}, "-kv-cache-max -1 is too small"),
        ({"move_share": 0.0}, "a move cannot take 0.0 of the time"),
        ({"move_share": 1.0}, "a move cannot take 1.0 of the time"),
        (
            {"page_sizes": (("cpu:0", 64), ("cpu:1", 48))},
            "the page size of cpu:1 48 is not a power",
        ),
    ],
)
def test_impossible_choices_are_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**choice)


def test_a_configuration_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().threads = 3  # type: ignore[misc]
