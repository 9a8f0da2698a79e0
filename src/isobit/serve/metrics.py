"""What /metrics reports, in Prometheus' form."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from isobit.engine.request import Finished

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
RATES = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
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

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Report the current value of `read`."""
        Gauge(name, help, registry=self.registry).set_function(read)

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
