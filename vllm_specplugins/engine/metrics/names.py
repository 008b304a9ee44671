"""Every metric that is exported: the one table. Knows neither vLLM nor prometheus_client.

Each has vLLM's labels `model_name` and `engine`, `method`, and its own. A stage is called "index method", as in
"0 prompt_lookup"; a method without stages is its own stage 0.
"""

from dataclasses import dataclass
from functools import cache

PREFIX = "vllm:specplugins_"  # vLLM's own prefix: its `get_metrics()` and its clean-up go by that
LABELS = ("model_name", "engine", "method")


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table.

    Args:
        kind: "counter", "gauge" or "histogram".
        name: without PREFIX, and without the "_total" that a counter gets.
        labels: its own, after LABELS.
        words: what it counts.
        buckets: upper bounds of a histogram.
    """

    kind: str
    name: str
    labels: tuple[str, ...]
    words: str
    buckets: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        """As Prometheus shows it; a histogram's series have _bucket, _sum and _count after that."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

TABLE: tuple[Metric, ...] = (
    Metric("counter", "asked", ("stage",), "How often a stage was asked to draft for a request."),
    Metric("counter", "drafts", ("stage",), "Steps of single requests in which a draft had tokens of a stage."),
    Metric("counter", "drafted_tokens", ("stage",), "Tokens that a stage drafted."),
    Metric(
        "counter",
        "kept_tokens",
        ("stage",),
        "Tokens of a stage that the stage behind it kept, or that went to the target where there is none.",
    ),
    Metric("counter", "verified_tokens", ("stage",), "Tokens of a stage that the target verified."),
    Metric("counter", "accepted_tokens", ("stage",), "Tokens of a stage that the target accepted."),
    Metric(
        "counter",
        "accepted_tokens_by_position",
        ("stage", "position"),
        "Tokens of a stage that the target accepted, by position in the draft.",
    ),
    Metric("counter", "draft_lengths", ("length",), "Steps of single requests, by the length of their draft."),
    Metric("counter", "gate_lengths", ("stage", "length"), "Decisions of a cascade's gate, by the length it chose."),
    Metric("counter", "faults", ("stage", "cause"), "Faults of a stage that the barrier stopped."),
    Metric("counter", "times_switched_off", ("stage",), "How often a stage was switched off after repeated faults."),
    Metric("gauge", "switched_off", ("stage",), "Whether a stage is switched off now."),
    Metric("gauge", "store_bytes", ("stage",), "Memory of what a stage keeps of requests, in bytes."),
    Metric("gauge", "stored_outputs", ("stage",), "Outputs of earlier requests that suffix_lookup drafts from."),
    Metric("gauge", "stored_tokens", ("stage",), "Their tokens."),
    Metric("histogram", "draft_seconds", ("stage",), "Host time that a stage took for a step.", _SECONDS),
    Metric("histogram", "step_draft_seconds", (), "Host time of all drafting of a step.", _SECONDS),
    Metric("histogram", "verification_seconds", (), "Time of verification of a step with drafts, one in 64.", _SECONDS),
    Metric("histogram", "request_acceptance_rate", (), "Accepted / verified tokens of finished requests.", _RATES),
)
BY_NAME = {metric.name: metric for metric in TABLE}
REPORT = "specplugins"  # what a report is called in the dictionary that vLLM carries
SEPARATOR = "\t"  # between a metric's name and the values of its own labels, in a report's keys


@cache
def key(name: str, *labels: object) -> str:
    """What a report calls one series.

    >>> key("faults", "0 custom", "raised")
    'faults\\t0 custom\\traised'
    """
    return SEPARATOR.join((name, *map(str, labels)))
