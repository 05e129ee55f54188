"""What the server counts, in Prometheus' text format.

Enters: requests as they end, and an engine, which counts for itself. Leaves: the text of GET /metrics.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine import Engine

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class OfEngine(Collector):
    """What an engine knows, read when it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self.engine
        yield CounterMetricFamily("tokenformer_generated_tokens", "Tokens that were generated.", engine.generated)
        yield CounterMetricFamily("tokenformer_cancelled", "Answers that nobody waited for.", engine.cancelled)
        yield GaugeMetricFamily("tokenformer_running", "Answers that are being computed.", engine.running)
        yield GaugeMetricFamily("tokenformer_waiting", "Answers that wait for their turn.", engine.waiting)
        yield GaugeMetricFamily("tokenformer_draining", "1 if no new requests are taken.", int(engine.draining))


class Metrics:
    """The counters of one server."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(OfEngine(engine))
        says, labels = "Requests by path and status.", ("path", "status")
        self.requests = Counter("tokenformer_requests", says, labels, registry=self.registry)
        self.prompt_tokens = Counter("tokenformer_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.first = self._seconds("first_token", "From a request to the first token of its answer.")
        self.whole = self._seconds("request", "From a request to the end of its answer.")

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self.registry)

    def _seconds(self, name: str, says: str) -> Histogram:
        return Histogram(f"tokenformer_{name}_seconds", says, buckets=SECONDS, registry=self.registry)
