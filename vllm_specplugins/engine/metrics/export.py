"""Exports the workers' reports: from the front end on vLLM's /metrics and in `LLM.get_metrics()`, or on a port of a
worker. The metrics use vLLM's classes (prometheus_client's, or Ray's). Reports are increments, so several API servers
may each receive the reports of some steps."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.engine.metrics.names import HEALTH, LABELS, PREFIX, REPORT, SEPARATOR, TABLE, Metric, key
from vllm_specplugins.engine.metrics.port import Address, serve
from vllm_specplugins.isolation.faults import CAUSES, cause_text

logger = logging.getLogger("vllm.specplugins")

_OF_SOME_STAGES = ("store_bytes", "stored_outputs", "stored_tokens")
_VERBS = {"counter": "inc", "gauge": "set", "histogram": "observe"}


class Exporter:
    """The metrics of a front end. `vllm_config` holds the method's name; `vllm_logger` is vLLM's logger, or an object
    with the same metric classes and labels."""

    def __init__(self, vllm_config: VllmConfig, vllm_logger: Any):
        config = vllm_config.speculative_config.plugin_config
        self._metrics = {metric.name: (_made(metric, vllm_logger), _VERBS[metric.kind]) for metric in TABLE}
        self._labels = {index: [*values, config.method] for index, values in vllm_logger.per_engine_labelvalues.items()}
        self._series: dict[tuple[int, str], Callable[[float], None]] = {}
        self._has_failed = False
        for engine in self._labels:
            for series in _known_series(config):
                self._of(engine, series)

    def record(self, report: Mapping[str, Any], engine: int) -> None:
        """Adds a worker's report. Logs a failure once; requests continue."""
        try:
            for series, value in report.items():
                show = self._of(engine, series)
                for each in value if isinstance(value, list) else (value,):
                    show(each)
        except Exception as error:
            if not self._has_failed:
                logger.error(
                    "The engine cannot export a report of metrics (%s). Requests continue. This is logged once.",
                    cause_text(error),
                )
            self._has_failed = True

    def _of(self, engine: int, series: str) -> Callable[[float], None]:
        if (engine, series) not in self._series:
            name, *labels = series.split(SEPARATOR)
            made, verb = self._metrics[name]
            self._series[engine, series] = getattr(made.labels(*self._labels[engine], *labels), verb)
        return self._series[engine, series]


def shown_on(address: Address, vllm_config: VllmConfig) -> Callable[[Mapping[str, Any]], None]:
    """Serves the plugin's metrics on a port of this process, and returns the function that accepts a worker's
    reports."""
    registry, engine = CollectorRegistry(), vllm_config.parallel_config.data_parallel_index
    kinds = {"_counter_cls": Counter, "_gauge_cls": Gauge, "_histogram_cls": Histogram}
    made = {name: partial(kind, registry=registry) for name, kind in kinds.items()}
    labels = {engine: [vllm_config.model_config.served_model_name, str(engine)]}
    exporter = Exporter(vllm_config, SimpleNamespace(**made, per_engine_labelvalues=labels))
    try:
        serve(registry, address)
        logger.info("The plugin exports its metrics on http://%s/metrics.", address)
    except OSError as error:
        logger.error(
            "The engine cannot export metrics on %s (%s). Set VLLM_SPECPLUGINS_METRICS_PORT to a free port.",
            address,
            error,
        )
    return partial(exporter.record, engine=engine)


def _made(metric: Metric, vllm_logger: Any) -> Any:
    kinds: dict[str, Any] = {
        "counter": vllm_logger._counter_cls,
        "gauge": partial(vllm_logger._gauge_cls, multiprocess_mode="mostrecent"),
        "histogram": partial(vllm_logger._histogram_cls, buckets=metric.buckets),
    }
    labels = [*LABELS, *metric.labels]
    return kinds[metric.kind](name=PREFIX + metric.name, documentation=metric.words, labelnames=labels)


def _known_series(config: Any) -> Iterator[str]:
    """Returns the series that are exported as zeros from the start, since Prometheus's `increase` ignores the first
    count of a series. Series by position or length begin with their first count."""
    stages = [f"{index} {part.method}" for index, part in enumerate(config.parts)]
    for metric in TABLE:
        if not metric.labels:
            yield metric.name
        elif metric in HEALTH or (metric.labels == ("stage",) and metric.name not in _OF_SOME_STAGES):
            of_method = [config.method] if len(stages) > 1 and metric in HEALTH else []
            causes = [(cause,) for cause in CAUSES] if "cause" in metric.labels else [()]
            yield from (key(metric.name, stage, *cause) for stage in (*stages, *of_method) for cause in causes)


def export_metrics() -> None:
    """Makes vLLM's front ends export the plugin's metrics for its configurations. Applied once per process."""
    wrap(StatLoggerManager, "__init__", _with_exporter)
    wrap(StatLoggerManager, "record", _with_report)


def _with_exporter(original: Any, self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
    original(self, vllm_config, *args, **kwargs)
    self.specplugins = None
    if hasattr(vllm_config.speculative_config, "plugin_config"):
        vllm_logger = next(logger for logger in self.stat_loggers if isinstance(logger, PrometheusStatLogger))
        self.specplugins = Exporter(vllm_config, vllm_logger)


def _with_report(
    original: Any,
    self: Any,
    scheduler_stats: Any,
    iteration_stats: Any,
    mm_cache_stats: Any = None,
    engine_idx: int | None = None,
) -> None:
    carried = getattr(scheduler_stats, "ec_connector_stats", None)
    if self.specplugins is not None and carried and REPORT in carried:
        self.specplugins.record(carried.pop(REPORT), engine_idx or 0)
        scheduler_stats.ec_connector_stats = carried or None
    original(self, scheduler_stats, iteration_stats, mm_cache_stats=mm_cache_stats, engine_idx=engine_idx)
