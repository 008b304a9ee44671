"""In the front end: reports of the workers, shown on vLLM's own /metrics and in `LLM.get_metrics()`.

The metrics are made of the classes that vLLM's own are made of (prometheus_client's, or Ray's), and counters only grow:
so they are safe in several API servers, each of which gets the reports of some steps.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

from vllm_specplugins.engine.metrics.names import BY_NAME, LABELS, PREFIX, REPORT, SEPARATOR, TABLE, Metric, key

logger = logging.getLogger("vllm.specplugins")

_OF_SOME = ("store_bytes", "stored_outputs", "stored_tokens")  # stages
_PER_STAGE = [metric.name for metric in TABLE if metric.labels == ("stage",) and metric.name not in _OF_SOME]
_PER_LENGTH = {"accepted_tokens_by_position": 0, "gate_lengths": 1}  # how many more lengths than draft tokens there are


class Exporter:
    """The metrics of a front end.

    Args:
        vllm_config: names the method.
        theirs: vLLM's logger, with its classes of metrics and its labels.
    """

    def __init__(self, vllm_config: VllmConfig, theirs: PrometheusStatLogger):
        config = vllm_config.speculative_config.plugin_config
        self._metrics = {metric.name: _made(metric, theirs) for metric in TABLE}
        self._labels = {index: [*values, config.method] for index, values in theirs.per_engine_labelvalues.items()}
        self._series: dict[tuple[int, str], Any] = {}
        self._has_failed = False
        for engine in self._labels:
            for series in _known_series(config):
                self._of(engine, series)

    def record(self, report: Mapping[str, Any], engine: int) -> None:
        """Adds a worker's report. What it cannot show, it logs once: a request must not fail of it."""
        try:
            self._add(report, engine)
        except Exception:
            if not self._has_failed:
                logger.exception("A report of the metrics cannot be shown; requests go on.")
            self._has_failed = True

    def _add(self, report: Mapping[str, Any], engine: int) -> None:
        for series, value in report.items():
            shown, kind = self._of(engine, series)
            if kind == "counter":
                shown.inc(value)
            elif kind == "gauge":
                shown.set(value)
            else:
                for seconds in value:
                    shown.observe(seconds)

    def _of(self, engine: int, series: str) -> tuple[Any, str]:
        known = self._series.get((engine, series))
        if known is None:
            name, *labels = series.split(SEPARATOR)
            shown = self._metrics[name].labels(*self._labels[engine], *labels)
            known = self._series[engine, series] = (shown, BY_NAME[name].kind)
        return known


def _made(metric: Metric, theirs: PrometheusStatLogger) -> Any:
    what = {
        "name": PREFIX + metric.name,
        "documentation": metric.words,
        "labelnames": [*LABELS, *metric.labels],
    }
    if metric.kind == "counter":
        return theirs._counter_cls(**what)
    if metric.kind == "gauge":
        return theirs._gauge_cls(**what, multiprocess_mode="mostrecent")
    return theirs._histogram_cls(**what, buckets=metric.buckets)


def _known_series(config: Any) -> list[str]:
    """Those that are shown from the start, as zeros."""
    stages = config.stages or (config,)
    names = [f"{index} {stage.method}" for index, stage in enumerate(stages)]
    max_num_draft = config.common.num_speculative_tokens
    known = [metric.name for metric in TABLE if not metric.labels]
    known += [key("draft_lengths", length) for length in range(max_num_draft + 1)]
    if len(names) > 1:
        known += [key(name, config.method) for name in ("times_switched_off", "switched_off")]
    for stage in names:
        known += [key(name, stage) for name in _PER_STAGE]
        for name, more in _PER_LENGTH.items():
            if name != "gate_lengths" or (config.stages and config.common.gate != "off"):
                known += [key(name, stage, index) for index in range(max_num_draft + more)]
    return known


def export_metrics() -> None:
    """Has vLLM's front ends show our metrics where a configuration is ours; once per process."""
    if hasattr(StatLoggerManager.record, "__wrapped__"):
        return
    start, record = StatLoggerManager.__init__, StatLoggerManager.record

    @functools.wraps(start)
    def __init__(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        start(self, vllm_config, *args, **kwargs)
        self.specplugins = None
        if hasattr(vllm_config.speculative_config, "plugin_config"):
            theirs = next(logger for logger in self.stat_loggers if isinstance(logger, PrometheusStatLogger))
            self.specplugins = Exporter(vllm_config, theirs)

    @functools.wraps(record)
    def record_ours(
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
        record(self, scheduler_stats, iteration_stats, mm_cache_stats=mm_cache_stats, engine_idx=engine_idx)

    StatLoggerManager.__init__, StatLoggerManager.record = __init__, record_ours
