"""GET /metrics: what this server and its models did, as Prometheus reads it.

Knows choices that have ended and snapshots of engines. Each server has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from jitllm.api.choices import Choice
from jitllm.api.models import Served
from jitllm.engine import DeviceUse, EngineStats
from jitllm.errors import QueueFull
from jitllm.memory.use import ExpertUse, PhaseUse

Snapshot = Mapping[Served, EngineStats]

_MODEL = ("model",)


class Counts:
    """What was asked of a server and what it answered, by model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._in_flight = self._gauge("jitllm_requests_in_flight", "Requests under way")
        self._refused = self._counter("jitllm_requests_refused", "Requests refused: queue full")
        self._generates = self._counter("jitllm_generates", "Sequences that ended")
        self._generated = self._counter("jitllm_tokens_generated", "Generated tokens")
        self._prefilled = self._counter("jitllm_tokens_prefilled", "Prompt tokens of sequences")
        self._restored = self._counter(
            "jitllm_prompt_positions_restored", "Prompt positions whose keys and values were there"
        )
        self._computed = self._counter(
            "jitllm_prompt_positions_computed", "Prompt positions that were computed"
        )
        self._prefill_s = self._summary("jitllm_prefill_seconds", "Prompt to first token")
        self._decode_s = self._summary("jitllm_decode_seconds", "First token to last")
        self._queued_s = self._summary("jitllm_queue_seconds", "Submitted to admitted")

    @contextmanager
    def request(self, model: str, choices: Sequence[Choice]) -> Iterator[None]:
        """Count a request, whatever becomes of it in the block."""
        self._in_flight.labels(model).inc()
        try:
            yield
        except QueueFull:
            self._refused.labels(model).inc()
            raise
        finally:
            self._in_flight.labels(model).dec()
            for choice in choices:
                if choice.progress.is_started:
                    self._count(model, choice)

    def _count(self, model: str, choice: Choice) -> None:
        costs, prompt = choice.costs(), len(choice.request.prompt)
        self._generates.labels(model).inc()
        self._generated.labels(model).inc(choice.num_tokens)
        self._prefilled.labels(model).inc(prompt)
        self._restored.labels(model).inc(costs.cached_tokens)
        self._computed.labels(model).inc(max(prompt - costs.cached_tokens, 0))
        self._prefill_s.labels(model).observe(costs.prefill_s)
        self._decode_s.labels(model).observe(costs.decode_s)
        self._queued_s.labels(model).observe(costs.queued_s)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _MODEL, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _MODEL, registry=self.registry)

    def _summary(self, name: str, text: str) -> Summary:
        return Summary(name, text, _MODEL, registry=self.registry)


def exposition(counts: Counts, snapshot: Snapshot, num_sessions: int) -> bytes:
    """The whole page, text format 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_Engines(snapshot, num_sessions))
    return generate_latest(counts.registry) + generate_latest(registry)


class _Engines(Collector):
    """Snapshots as metrics."""

    def __init__(self, snapshot: Snapshot, num_sessions: int) -> None:
        self._snapshot = snapshot
        self._num_sessions = num_sessions

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        yield _alone("jitllm_models_loaded", "Models at work", len(self._snapshot))
        yield _alone("jitllm_sessions", "Requests under way", self._num_sessions)
        for name, text, read in _GAUGES:
            yield self._family(GaugeMetricFamily(name, text, labels=_MODEL), read)
        for name, text, read in _COUNTERS:
            yield self._family(CounterMetricFamily(name, text, labels=_MODEL), read)
        for name, text, number in _EXPERT_GAUGES:
            yield self._of_experts(GaugeMetricFamily(name, text, labels=_MODEL), number)
        for name, text, number in _EXPERT_COUNTERS:
            yield self._of_experts(CounterMetricFamily(name, text, labels=_MODEL), number)
        for name, text, of_phase in _OF_PHASES:
            yield self._of_phases(name, text, of_phase)
        for name, text, read in _MOVE_TIMES:
            summary = SummaryMetricFamily(name, text, labels=_MODEL)
            for served, stats in self._snapshot.items():
                summary.add_metric([served.id], stats.moves, read(served, stats))
            yield summary
        yield self._moved_bytes()
        for name, text, device_number in _OF_DEVICES:
            gauge = GaugeMetricFamily(name, text, labels=("model", "device"))
            for served, stats in self._snapshot.items():
                for device in stats.devices:
                    gauge.add_metric([served.id, device.name], device_number(device))
            yield gauge

    def _moved_bytes(self) -> Metric:
        family = CounterMetricFamily(
            "jitllm_move_bytes", "Keys and values that moved", labels=("model", "phase")
        )
        for served, stats in self._snapshot.items():
            family.add_metric([served.id, "before"], stats.move_totals.bytes_before)
            family.add_metric([served.id, "paused"], stats.move_totals.bytes_paused)
        return family

    def _of_phases(self, name: str, text: str, read: Callable[[PhaseUse], float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model", "phase"))
        for served, stats in self._snapshot.items():
            for phase, use in stats.pages.phases.items():
                family.add_metric([served.id, phase], read(use))
        return family

    def _of_experts(
        self, family: GaugeMetricFamily | CounterMetricFamily, read: Callable[[ExpertUse], float]
    ) -> Metric:
        """Of models whose experts come one by one."""
        for served, stats in self._snapshot.items():
            if stats.pages.experts is not None:
                family.add_metric([served.id], read(stats.pages.experts))
        return family

    def _family(self, family: GaugeMetricFamily | CounterMetricFamily, read: _Read) -> Metric:
        for served, stats in self._snapshot.items():
            family.add_metric([served.id], read(served, stats))
        return family


class _Read:
    """A number of a snapshot, by its path: `pages.budget_bytes`."""

    def __init__(self, path: str) -> None:
        self._names = path.split(".")

    def __call__(self, served: Served, stats: EngineStats) -> float:
        value: object = stats
        for name in self._names:
            value = getattr(value, name)
        assert isinstance(value, int | float)
        return value


class _ResidentBytes(_Read):
    """What a model holds on the host: what is always there, and its resident blocks."""

    def __init__(self) -> None:
        super().__init__("pages.resident")

    def __call__(self, served: Served, stats: EngineStats) -> float:
        header, experts = served.header, stats.pages.experts
        sizes: Sequence[int] = header.frame_bytes
        held = stats.pages.fixed_bytes
        if experts is not None:  # blocks are there without them
            sizes = [extent.length for extent in header.blocks]
            held += experts.held_bytes
        return held + super().__call__(served, stats) * sum(sizes) / max(len(sizes), 1)


_GAUGES = (
    ("jitllm_requests_running", "Sequences that steps are made of", _Read("running")),
    ("jitllm_requests_waiting", "Sequences in the queue", _Read("waiting")),
    ("jitllm_host_resident_bytes", "Memory held on the host", _ResidentBytes()),
    ("jitllm_page_budget_bytes", "Memory budget on the host", _Read("pages.budget_bytes")),
    ("jitllm_page_fixed_bytes", "Memory that is never paged", _Read("pages.fixed_bytes")),
    ("jitllm_over_budget_bytes", "Memory beyond the budget", _Read("pages.over_budget_bytes")),
    ("jitllm_blocks", "Transformer blocks", _Read("pages.blocks")),
    ("jitllm_blocks_resident", "Blocks in memory", _Read("pages.resident")),
    ("jitllm_frames", "Blocks that the budget holds", _Read("pages.frames")),
    ("jitllm_kv_bytes", "Keys and values", _Read("kv_bytes")),
    ("jitllm_kv_idle_bytes", "Keys and values kept for prompts to come", _Read("kv_idle_bytes")),
    ("jitllm_mem_cache_bytes", "Keys and values kept of prefixes", _Read("kv_idle_bytes")),
    ("jitllm_kv_spilled_bytes", "Keys and values beyond -kv-budget", _Read("kv_spill.num_bytes")),
    ("jitllm_sessions_parked", "Sequences that wait to be resumed", _Read("parked")),
    ("jitllm_parked_disk_bytes", "Keys and values on disk", _Read("parked_disk_bytes")),
    ("jitllm_parked_memory_bytes", "The same in memory", _Read("parked_memory_bytes")),
    ("jitllm_prefix_disk_bytes", "Prefixes on disk", _Read("prefix_disk_bytes")),
    ("jitllm_prefix_waiting_bytes", "On their way there", _Read("prefix_waiting_bytes")),
    ("jitllm_scratch_bytes", "Scratch memory", _Read("scratch_bytes")),
    ("jitllm_threads", "Threads that compute", _Read("threads")),
    ("jitllm_context_tokens", "Longest history", _Read("context_tokens")),
)

_COUNTERS = (
    ("jitllm_steps", "Forward passes of a batch", _Read("steps")),
    ("jitllm_page_ins", "Blocks read from disk", _Read("pages.page_ins")),
    ("jitllm_page_evictions", "Blocks given up", _Read("pages.evictions")),
    ("jitllm_page_read_bytes", "Bytes read from disk", _Read("pages.bytes_read")),
    ("jitllm_page_read_seconds", "Time spent reading", _Read("pages.read_s")),
    ("jitllm_page_wait_seconds", "Time spent waiting for reads", _Read("pages.wait_s")),
    ("jitllm_kv_read_bytes", "Keys and values read from disk", _Read("kv_spill.bytes_read")),
    ("jitllm_kv_written_bytes", "The same written", _Read("kv_spill.bytes_written")),
    ("jitllm_moves", "Moves of blocks between devices", _Read("moves")),
    ("jitllm_moved_blocks", "Blocks that moved, and heads", _Read("moved_blocks")),
    ("jitllm_blocks_sent_home", "Blocks that left a GPU to give room", _Read("sent_home")),
    ("jitllm_blocks_brought_back", "Of these, blocks that came back", _Read("brought_back")),
    ("jitllm_move_pages", "Pages that history was moved into", _Read("move_totals.pages")),
    ("jitllm_preempt_parks", "Sequences that left their pages", _Read("park_totals.parks")),
    ("jitllm_preempt_slices", "Of these, to make way", _Read("park_totals.slices")),
    ("jitllm_preempt_resumes", "Sequences that came back", _Read("park_totals.resumes")),
    ("jitllm_preempt_bytes_out", "Keys and values put away", _Read("park_totals.bytes_out")),
    ("jitllm_preempt_bytes_in", "Keys and values put back", _Read("park_totals.bytes_in")),
    ("jitllm_preempt_failures", "Parks and resumes that failed", _Read("park_totals.failures")),
    ("jitllm_preempt_park_seconds", "Time that parks took", _Read("park_totals.park_s")),
    ("jitllm_preempt_resume_seconds", "The same of resumes", _Read("park_totals.resume_s")),
    ("jitllm_prefix_hits", "Prompts begun from disk", _Read("prefix_totals.hits")),
    ("jitllm_prefix_whole", "Of these, with all of it there", _Read("prefix_totals.whole")),
    ("jitllm_prefix_restore_seconds", "Time to fill in", _Read("prefix_totals.restore_s")),
    ("jitllm_prefix_misses", "Prompts that were not", _Read("prefix_totals.misses")),
    ("jitllm_prefix_tokens", "Positions from disk", _Read("prefix_totals.tokens")),
    ("jitllm_prefix_files", "Files of prefixes written", _Read("prefix_totals.files")),
    ("jitllm_prefix_bytes_out", "Bytes in them", _Read("prefix_totals.bytes_out")),
    ("jitllm_prefix_bytes_in", "Bytes of prefixes read", _Read("prefix_totals.bytes_in")),
    ("jitllm_prefix_evictions", "Files that had to go", _Read("prefix_totals.evictions")),
    ("jitllm_prefix_damaged", "Files that were not whole", _Read("prefix_totals.damaged")),
    ("jitllm_prefix_failures", "Reads and writes refused", _Read("prefix_totals.failures")),
    (
        "jitllm_prefix_skipped",
        "Prefixes not stored: busy or full",
        _Read("prefix_totals.skipped"),
    ),
    ("jitllm_device_losses", "Deaths of devices", _Read("losses")),
)

_EXPERT_GAUGES: tuple[tuple[str, str, Callable[[ExpertUse], float]], ...] = (
    ("jitllm_expert_room_bytes", "Memory that experts may take", lambda use: use.room_bytes),
    ("jitllm_expert_held_bytes", "Memory that experts take", lambda use: use.held_bytes),
)

_EXPERT_COUNTERS: tuple[tuple[str, str, Callable[[ExpertUse], float]], ...] = (
    ("jitllm_expert_hits", "Experts that steps needed and found", lambda use: use.hits),
    ("jitllm_expert_reads", "Experts that had to be read", lambda use: use.reads),
    ("jitllm_expert_read_bytes", "Bytes read for them", lambda use: use.bytes_read),
    ("jitllm_expert_read_seconds", "Time spent reading them", lambda use: use.read_s),
    ("jitllm_expert_wait_seconds", "Time that steps waited for them", lambda use: use.wait_s),
)

_OF_PHASES: tuple[tuple[str, str, Callable[[PhaseUse], float]], ...] = (
    ("jitllm_phase_read_bytes", "Bytes read from disk in a phase", lambda use: use.bytes_read),
    ("jitllm_phase_reads", "Blocks and experts read in a phase", lambda use: use.requests),
    ("jitllm_phase_faults", "What steps had to wait for in a phase", lambda use: use.faults),
    ("jitllm_phase_read_seconds", "Time with something being read", lambda use: use.seconds),
    ("jitllm_phase_tokens", "Tokens computed in a phase", lambda use: use.tokens),
)

_MOVE_TIMES = (
    ("jitllm_move_pause_seconds", "Steps stood still for a move", _Read("move_totals.pause_s")),
    ("jitllm_move_prepare_seconds", "Moves before that", _Read("move_totals.prepare_s")),
)

_OF_DEVICES: tuple[tuple[str, str, Callable[[DeviceUse], float]], ...] = (
    ("jitllm_device_blocks", "Blocks that a device computes", lambda device: device.blocks),
    ("jitllm_device_kv_bytes", "Keys and values on a device", lambda device: device.kv_bytes),
)


def _alone(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
