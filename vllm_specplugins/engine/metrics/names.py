"""Defines the table of exported metrics, independently of vLLM and prometheus_client. Each metric has vLLM's labels
`model_name` and `engine`, `method`, and further labels. A stage is named "index method", for example "0 prompt_lookup";
a single method is stage 0."""

from dataclasses import dataclass
from functools import cache

PREFIX = "vllm:specplugins_"  # vLLM's `get_metrics()` and clean-up select metrics by "vllm:"
LABELS = ("model_name", "engine", "method")
SHAPE = ("batch", "context", "draft_tokens")  # of a step, in buckets (steps.py)


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table.

    Args:
        kind: "counter", "gauge" or "histogram".
        name: without PREFIX, and without the "_total" that a counter gets.
        words: its description.
        field: of `counters.StageCounters`; a list or dictionary has a series per entry.
        labels: after LABELS.
        buckets: upper bounds of a histogram.
    """

    kind: str
    name: str
    words: str
    field: str = ""
    labels: tuple[str, ...] = ("stage",)
    buckets: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)  # seconds


_STEPS = (0.003, 0.006, 0.01, 0.02, 0.04, 0.08, 0.16, 0.5, 2.0)  # seconds
_RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_LEFT = "Tokens of a stage that the next stage accepted; for the last stage, tokens sent to the target."
_AT = "Tokens of a stage that the target accepted, by position in the draft."
_GATE = "Decisions of a cascade's gate, by the length that it chose."
_EXCHANGED = "Outputs that suffix_lookup exchanged with its server, and requests of remote to its server, by result."
_LEARNED = "Progress of a part that learns: examples (tokens), steps, candidates, promotions, rollbacks."
_LENGTH = (
    "Acceptance length of a part that learns: measured recently, and expected of the loaded and the served weights."
)
_COSTS = "Costs that trimming used in the latest step: of the step without drafts, and of each verified draft token."
_OFF = "Number of times that a stage's circuit breaker opened after repeated faults."
_FIRST = (
    "Requests of steps that verified whole drafts, by the position of the first rejected token, rounded down to a "
    "power of two; none if all were accepted."
)
_WHY = "Decoding steps that verified no draft token, by reason."

COUNTS = (
    Metric("counter", "asked", "Number of times that a stage was asked to draft for a request.", "asked"),
    Metric("counter", "num_drafts", "Steps of single requests with a draft that has tokens of a stage.", "drafts"),
    Metric("counter", "drafted_tokens", "Tokens that a stage drafted.", "drafted"),
    Metric("counter", "kept_tokens", _LEFT, "kept"),
    Metric("counter", "num_draft_tokens", "Tokens of a stage that the target verified.", "verified"),
    Metric("counter", "num_accepted_tokens", "Tokens of a stage that the target accepted.", "accepted"),
    Metric("counter", "num_accepted_tokens_per_pos", _AT, "accepted_at", ("stage", "position")),
    Metric("counter", "gate_lengths", _GATE, "gate_lengths", ("stage", "length")),
)
HEALTH = (
    Metric("counter", "faults", "Faults of a stage that the barrier stopped.", "faults", ("stage", "cause")),
    Metric("counter", "circuit_breaker_openings", _OFF, "times_switched_off"),
    Metric("gauge", "circuit_breaker_open", "Whether a stage's circuit breaker is open now.", "switched_off"),
)
TABLE: tuple[Metric, ...] = (
    *COUNTS,
    Metric(
        "counter",
        "steps",
        "Steps of single requests that emitted a token, except each request's first step.",
        labels=(),
    ),
    Metric("counter", "draft_lengths", "Steps of single requests, by the length of their draft.", labels=("length",)),
    *HEALTH,
    Metric("gauge", "drafting_off", "Whether specplugins_gate switched drafting off.", labels=()),
    Metric("gauge", "step_cost_seconds", _COSTS, labels=("part",)),
    Metric("gauge", "store_bytes", "Memory that a stage uses for data of requests, in bytes."),
    Metric("gauge", "stored_outputs", "Outputs of earlier requests in the store of suffix_lookup."),
    Metric("gauge", "stored_tokens", "Tokens in the store of suffix_lookup."),
    Metric("counter", "exchanges", _EXCHANGED, labels=("stage", "what")),
    Metric("counter", "learned", _LEARNED, labels=("stage", "what")),
    Metric("gauge", "learned_length", _LENGTH, labels=("stage", "weights")),
    Metric("histogram", "draft_time_seconds", "Host time of a stage in steps in which a request wanted drafts."),
    Metric(
        "histogram",
        "step_draft_time_seconds",
        "Host time of all stages in steps in which a request wanted drafts.",
        labels=(),
    ),
    Metric(
        "histogram",
        "request_acceptance_rate",
        "Share of verified draft tokens that were accepted, by finished request.",
        "",
        (),
        _RATES,
    ),
    Metric("histogram", "shape_time_seconds", "Time of decoding steps.", "", SHAPE, _STEPS),
    Metric("counter", "shape_draft_time_seconds", "Host time of drafting in decoding steps.", labels=SHAPE),
    Metric("counter", "shape_steps", "Decoding steps, by the kind of CUDA graph.", labels=(*SHAPE, "graph")),
    Metric("counter", "shape_tokens", "Tokens that decoding steps emitted.", labels=SHAPE),
    Metric("counter", "shape_first_rejections", _FIRST, labels=(*SHAPE, "position")),
    Metric("counter", "undrafted_steps", _WHY, labels=("reason",)),
)
GAUGES = {metric.name for metric in TABLE if metric.kind == "gauge"}
REPORT = "specplugins"  # a report's key in the dictionary that vLLM carries
SEPARATOR = "\t"  # in a report's keys, between a metric's name and its label values


@cache
def key(name: str, *labels: object) -> str:
    """Returns the key of one series in a report.

    >>> key("faults", "0 custom", "raised")
    'faults\\t0 custom\\traised'
    """
    return SEPARATOR.join((name, *map(str, labels)))
