"""What a run says about itself: the lines on stderr and the numbers in JSON.

Knows the Engine port's snapshots and the container's header. The labels at the start of the lines
are what people and scripts look for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jitllm.cli.reply import Rates
from jitllm.engine import DeviceUse, EngineStats, KvSpill, Pages
from jitllm.errors import one_line
from jitllm.memory.use import ExpertUse, Phase, PhaseUse
from jitllm.units import counted, format_duration, format_rate, format_size

if TYPE_CHECKING:
    from jitllm.compose import Loaded
    from jitllm.formats.jlm import Header


def before(loaded: Loaded, stats: EngineStats) -> list[str]:
    """What is known before the first token."""
    return [
        *_compile_lines(loaded),
        _model_line(loaded),
        *_memory_lines(loaded.header, stats),
        *_placement_lines(stats),
        *_forecast_lines(loaded, stats.pages),
    ]


def after(rates: Rates, stats: EngineStats, page_ins_per_token: float) -> list[str]:
    """What a reply took."""
    pages = stats.pages
    return [
        _parts(
            f"prompt {rates.prompt_tokens} tok in {format_duration(rates.prefill_s)} "
            f"({format_rate(rates.prefill_tok_s, 'tok')})",
            f"decode {rates.decode_tokens} tok in {format_duration(rates.decode_s)} "
            f"({format_rate(rates.decode_tok_s, 'tok')})",
            *([f"{rates.cached_tokens} tok of the prompt cached"] if rates.cached_tokens else []),
        ),
        _parts(
            "pages ",
            f"{counted(pages.frames, 'frame')} for {counted(pages.blocks, 'block')}",
            counted(pages.page_ins, "page-in"),
            counted(pages.evictions, "eviction"),
            f"{format_size(pages.bytes_read)} read",
            f"{page_ins_per_token:.2f} page-ins per token",
        ),
        *(_phase_line(phase, use) for phase, use in pages.phases.items() if use.requests),
        *([experts_line(pages.experts)] if pages.experts else []),
        *_spill_lines(stats.kv_spill),
        *_move_lines(stats),
        *(_parts("seam  ", str(trial)) for trial in stats.seam_trials),
    ]


def _phase_line(phase: Phase, use: PhaseUse) -> str:
    """What was read in a phase."""
    return _parts(
        f"  {phase:<6}",
        f"{format_size(use.bytes_read)} read",
        counted(use.requests, "request"),
        counted(use.faults, "fault"),
        format_rate(use.bytes_per_second),
        *([f"{format_size(use.bytes_per_token)} a token"] if use.tokens else []),
    )


def experts_line(use: ExpertUse) -> str:
    """What paging experts one by one did."""
    return _parts(
        "experts",
        f"{use.hit_rate:.1%} of {use.hits + use.reads} were there",
        f"{format_size(use.bytes_read)} read",
        f"{format_duration(use.wait_s)} waited",
        f"{format_size(use.held_bytes)} of {format_size(use.room_bytes)} held",
    )


def _spill_lines(spill: KvSpill) -> list[str]:
    """Keys and values that their budget had no room for, if there were any."""
    if not spill.bytes_written:
        return []
    return [
        _parts(
            "keys  ",
            f"{format_size(spill.num_bytes)} in a file",
            f"{format_size(spill.bytes_read)} read",
            f"{format_size(spill.bytes_written)} written",
        )
    ]


def _move_lines(stats: EngineStats) -> list[str]:
    """Where blocks are by now, if any have moved, and how many because of a GPU without room."""
    if not stats.moves:
        return []
    parts = [counted(stats.moves, "move"), f"blocks are at {stats.placement}"]
    if stats.sent_home:
        parts.append(f"{counted(stats.sent_home, 'block')} went to the host for room")
        parts.append(f"{stats.brought_back} came back")
    return [_parts("moves ", *parts)]


def page_ins_per_token(start: EngineStats, stop: EngineStats) -> float:
    """Page-ins per step between two snapshots of an idle engine; 0 without a step between them.

    Those that filled an empty frame are not counted: they come once, however long the reply is.
    """
    if stop.steps <= start.steps:
        return 0.0
    filled = max(stop.pages.resident - start.pages.resident, 0)
    page_ins = stop.pages.page_ins - start.pages.page_ins - filled
    return max(page_ins, 0) / (stop.steps - start.steps)


def pages_json(pages: Pages, page_ins_per_token: float) -> dict[str, Any]:
    """`pages` of a JSON report."""
    return {
        "blocks": pages.blocks,
        "resident": pages.resident,
        "frames": pages.frames,
        "page_ins": pages.page_ins,
        "evictions": pages.evictions,
        "bytes_read": pages.bytes_read,
        "page_ins_per_token": page_ins_per_token,
        "budget_bytes": pages.budget_bytes,
        "fixed_bytes": pages.fixed_bytes,
        "over_budget_bytes": pages.over_budget_bytes,
        "read_s": pages.read_s,
        "wait_s": pages.wait_s,
        "experts": experts_json(pages.experts),
        "phases": {phase: phase_json(use) for phase, use in pages.phases.items()},
    }


def phase_json(use: PhaseUse) -> dict[str, Any]:
    """One of `phases` of `pages`."""
    return {
        **asdict(use),
        "bytes_per_second": use.bytes_per_second,
        "bytes_per_token": use.bytes_per_token,
    }


def experts_json(use: ExpertUse | None) -> dict[str, Any] | None:
    """`experts` of `pages`; null where a block comes with all of its own."""
    return None if use is None else {**asdict(use), "hit_rate": use.hit_rate}


def engine_json(loaded: Loaded, stats: EngineStats) -> dict[str, Any]:
    """How the engine was set up."""
    return {
        "placement": str(stats.placement),
        "declines": [str(decline) for decline in stats.declines],
        "moves": stats.moves,
        "sent_home": stats.sent_home,
        "brought_back": stats.brought_back,
        "devices": [asdict(device) for device in stats.devices],
        "tier": stats.tier,
        "threads": stats.threads,
        "ctx_tokens": stats.context_tokens,
        "open_s": loaded.open_s,
        "compiled_kernels": loaded.compiled_kernels,
        "compile_s": loaded.compile_s,
        "kv_spill": asdict(stats.kv_spill),
        "prefixes": asdict(stats.prefix_totals),
    }


def weight_bytes_per_token(header: Header) -> int:
    """What a decoded token reads: everything, but of experts only those that it uses, and of an
    embedding that is not also the head only a row."""
    matrices = {entry.role: entry for entry in header.tensors if entry.block is None}
    embedding = matrices.get("token_embd")
    unused = 0
    if embedding is not None and "output" in matrices:
        unused = embedding.size_bytes - embedding.size_bytes // max(embedding.rows, 1)
    used = header.config.get("expert_used_count")
    if isinstance(used, int):
        unused += sum(
            extent.length for _, *experts in header.runs() for extent in experts[max(used, 0) :]
        )
    return header.weight_bytes - unused


def _compile_lines(loaded: Loaded) -> list[str]:
    num = loaded.compiled_kernels
    return (
        [f"compiling kernels {num}/{num} took {format_duration(loaded.compile_s)}"] if num else []
    )


def _model_line(loaded: Loaded) -> str:
    config = loaded.header.config
    heads, kv_heads = config.get("attention.head_count"), config.get("attention.head_count_kv")
    return _parts(
        "model ",
        loaded.header.arch,
        counted(loaded.graph.num_blocks, "block"),
        f"width {loaded.graph.width}",
        f"heads {heads}/{kv_heads}",
        f"ffn {config.get('feed_forward_length')}",
        f"vocabulary {loaded.graph.vocab}",
    )


def _memory_lines(header: Header, stats: EngineStats) -> list[str]:
    pages = stats.pages
    lines = [
        _parts(
            "memory",
            f"budget {format_size(pages.budget_bytes)}",
            f"weights {format_size(header.weight_bytes)}",
            f"KV as it grows, for {counted(stats.context_tokens, 'token')} at most",
            f"{format_size(weight_bytes_per_token(header))} of weights per token",
        )
    ]
    if pages.over_budget_bytes > 0:
        lines.append(
            _parts(
                "memory",
                f"* OVER BUDGET by {format_size(pages.over_budget_bytes)}: what is always held "
                f"and one block take more than {format_size(pages.budget_bytes)}",
            )
        )
    return lines


def _placement_lines(stats: EngineStats) -> list[str]:
    """Where blocks are, if there is more than one place, and what was asked for in vain."""
    devices = [f"{use.name} with {_means(use)}" for use in stats.devices]
    placed = [_parts("place ", str(stats.placement), *devices)] if len(devices) > 1 else []
    declined = [_parts("place ", f"* not so: {decline}") for decline in stats.declines]
    return [*placed, *map(one_line, declined)]


def _means(use: DeviceUse) -> str:
    """What a device computes with, or in."""
    if use.threads:
        return counted(use.threads, "thread")
    return f"{format_size(use.allocated_bytes)} of {format_size(use.budget_bytes)}"


def _forecast_lines(loaded: Loaded, pages: Pages) -> list[str]:
    """What a budget that holds fewer blocks than there are will cost."""
    header = loaded.header
    lines = []
    if pages.frames < pages.blocks:
        own_bytes = [extent.length for extent in header.blocks]
        lines.append(
            _block_forecast(loaded, pages, own_bytes if pages.experts else header.frame_bytes)
        )
    if use := pages.experts:
        sizes = [expert.extent.length for expert in header.experts]
        lines.append(
            _parts(
                "experts",
                f"{min(use.room_bytes // max(sizes), len(sizes))} of {len(sizes)} fit",
                f"{format_size(max(sizes))} an expert",
                f"{format_size(use.room_bytes)} of budget for experts",
            )
        )
    return lines


def _block_forecast(loaded: Loaded, pages: Pages, block_bytes: Sequence[int]) -> str:
    """What blocks of these sizes will cost."""
    largest = max(block_bytes)
    useful = pages.frames - (1 if loaded.config.read_ahead == "on" else 0)
    optimum = pages.blocks * (pages.blocks - useful) / max(pages.blocks - 1, 1)
    per_token = min(optimum, pages.blocks)  # a cyclic scan over so many frames
    taken = pages.fixed_bytes + (pages.experts.room_bytes if pages.experts else 0)
    room = max(pages.budget_bytes - taken, 0)
    return _parts(
        "pages ",
        f"{pages.frames} of {counted(pages.blocks, 'block')} fit",
        f"{format_size(largest)} a block",
        f"{format_size(room)} of budget for blocks",
        f"about {per_token:.1f} page-ins per token",
    )


def _parts(*parts: str) -> str:
    return "   ".join(parts)
