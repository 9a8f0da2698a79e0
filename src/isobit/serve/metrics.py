"""What /metrics reports, in Prometheus' form."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from isobit.engine.request import Finished

if TYPE_CHECKING:
    from isobit.engine.engine import EngineStatus

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
ENGINE = (
    ("isobit_queue_length", "Requests that wait.", "queued"),
    ("isobit_running", "Requests that are being served.", "running"),
    ("isobit_lanes", "Requests that can be served at the same time.", "lanes"),
    ("isobit_free_pages", "Pages for keys and values that nothing holds.", "free_pages"),
    ("isobit_memory_bytes", "Anonymous memory of the process.", "resident_bytes"),
)
ENGINE_TOTALS = (
    ("isobit_prompt_rows", "Prompt rows computed.", "prompt_rows"),
    ("isobit_drawn_tokens", "Reply tokens drawn, of unfinished requests too.", "reply_tokens"),
)
CACHE = (
    ("isobit_cache_entries", "Kept states in memory.", "entries"),
    ("isobit_cache_bytes", "Memory of the kept states.", "nbytes"),
    ("isobit_cache_limit_bytes", "Memory that kept states may take.", "limit_bytes"),
    (
        "isobit_cache_host_entries",
        "Kept states in the host tier.",
        "host_entries",
    ),
    ("isobit_cache_host_bytes", "Host memory that these take.", "host_nbytes"),
    ("isobit_cache_host_limit_bytes", "Host memory that they may take.", "host_limit_bytes"),
    ("isobit_cache_spill_entries", "Kept states in the spill folder.", "spill_entries"),
    ("isobit_cache_spill_bytes", "Disk space of the spill folder's states.", "spill_nbytes"),
)
CACHE_TOTALS = (
    ("isobit_cache_hits", "Prompts that went on from a kept state.", "hits"),
    ("isobit_cache_misses", "Prompts that found none.", "misses"),
    ("isobit_cache_rows_saved", "Prompt rows that kept states stood for.", "rows_saved"),
    ("isobit_cache_evictions", "Kept states dropped from memory.", "evictions"),
    ("isobit_cache_host_stored", "Kept states given to the host tier.", "host_stored"),
    ("isobit_cache_host_hits", "Kept states taken from the host tier.", "host_hits"),
    ("isobit_cache_host_skipped", "Kept states that the host tier had no memory for.", "host_skipped"),
    ("isobit_cache_spilled", "Kept states given to the spill folder.", "spilled"),
    ("isobit_cache_spill_skipped", "Kept states dropped because the disk was still busy with others.", "spill_skipped"),
    ("isobit_cache_restored", "Kept states read back from it.", "restored"),
)
DRAFTS = (("isobit_draft_resting_lanes", "Lanes whose drafts rest because they lost time.", "resting"),)
DRAFT_TOTALS = (
    ("isobit_drafts", "Drafts verified, by their source.", "drafts"),
    ("isobit_draft_tokens_proposed", "Drafted tokens.", "proposed_tokens"),
    ("isobit_draft_tokens_accepted", "Drafted tokens that were right.", "accepted_tokens"),
    ("isobit_draft_guard_stops", "Times a lane stopped drafting because it lost time.", "stops"),
    ("isobit_draft_guard_probes", "Times a lane tried drafting again.", "probes"),
)
RATES = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000)


class Metrics:
    """Counters and histograms of one server, and what its engine says of itself (`status`)."""

    def __init__(self, status: Callable[[], "EngineStatus"]):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(status))
        self.requests = self._counter("isobit_requests", "Requests by outcome.", ["outcome"])
        self.prompt_tokens = self._counter("isobit_prompt_tokens", "Prompt tokens of finished requests.")
        self.cached_tokens = self._counter("isobit_prompt_tokens_cached", "Prompt tokens taken from kept states.")
        self.reply_tokens = self._counter("isobit_reply_tokens", "Reply tokens drawn.")
        self.queued_seconds = self._histogram("isobit_queue_seconds", "Seconds a request waited.", SECONDS)
        self.first_token = self._histogram(
            "isobit_time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", SECONDS
        )
        self.seconds = self._histogram(
            "isobit_request_seconds", "Seconds from a request's arrival to its end.", SECONDS
        )
        self.prompt_rate = self._histogram("isobit_prompt_tokens_per_second", "Prompt speed of a request.", RATES)
        self.reply_rate = self._histogram("isobit_reply_tokens_per_second", "Reply speed of a request.", RATES)

    def finished(self, outcome: str, event: Finished, prompt_tokens: int, reply_tokens: int) -> None:
        """Count a request that the engine has ended."""
        self.requests.labels(outcome).inc()
        self.queued_seconds.observe(event.timings.queued)
        self.seconds.observe(event.timings.total)
        if not reply_tokens:
            return
        self.prompt_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(event.rows_reused)
        self.reply_tokens.inc(reply_tokens)
        self.first_token.observe(event.timings.first_token)
        self.prompt_rate.observe(event.timings.prompt_rate)
        if reply_tokens > 1:
            self.reply_rate.observe(event.timings.reply_rate)

    def render(self) -> bytes:
        """The text form."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, labels: list[str] | None = None) -> Counter:
        return Counter(name, help, labels or [], registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """The engine's own counts, all of one moment."""

    def __init__(self, status: Callable[[], "EngineStatus"]):
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for source, gauges, totals in ((status, ENGINE, ENGINE_TOTALS), (status.cache, CACHE, CACHE_TOTALS)):
            for name, help, field in gauges:
                yield GaugeMetricFamily(name, help, getattr(source, field))
            for name, help, field in totals:
                yield CounterMetricFamily(name, help, getattr(source, field))
        for family, listed in ((GaugeMetricFamily, DRAFTS), (CounterMetricFamily, DRAFT_TOTALS)):
            for name, help, field in listed:
                metric = family(name, help, labels=["source"])
                for drafts, counters in status.drafts.items():
                    metric.add_metric([drafts], getattr(counters, field))
                yield metric

    def describe(self) -> list[Metric]:
        return []
