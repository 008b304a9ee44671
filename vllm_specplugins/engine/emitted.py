"""Counts the tokens that requests emit, in the plugin's schedulers. A request may end within a draft, at an end token
or by an abort. The worker then has counted the rest of the draft as accepted, but vLLM's scheduler drops it. The
scheduler therefore corrects the metrics reports, and sends the totals to the worker for its logs. It subtracts a
dropped token from the stage with the largest count at that position."""

from collections import Counter
from typing import Any

from vllm_specplugins.engine.messages import Emitted, StepNews, facts_of, news_of
from vllm_specplugins.engine.metrics.names import REPORT, SEPARATOR, key
from vllm_specplugins.engine.metrics.steps import StepWatch
from vllm_specplugins.engine.room import MakesRoom
from vllm_specplugins.engine.switch import Switched

_BY_POSITION = "num_accepted_tokens_per_pos"


class CountsEmitted(Switched, MakesRoom):
    """A mixin for vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._num_steps, self._dropped = 0, Counter[int]()  # request steps without first tokens; tokens by position
        self._num_reported, self._to_report = 0, Counter[int]()
        self._watch = StepWatch()
        self._sent = self._emitted = Emitted()  # the totals sent to the worker, and the current totals

    def add_request(self, request: Any) -> None:
        if request.resumable:  # other requests use vLLM's method
            self._update_request_with_output = self._update_session
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        num_sampled = list(map(len, model_runner_output.sampled_token_ids))  # vLLM truncates the lists
        lengths = news_of(scheduler_output).verifies, facts_of(model_runner_output).num_verified
        self._watch.add(scheduler_output, model_runner_output, num_sampled, *lengths)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if sum(num_sampled) > self.count(outputs):
            self._drop(outputs, model_runner_output.req_id_to_index, num_sampled)
        self.correct_report(model_runner_output)
        rests = self.is_off and news_of(scheduler_output).is_off
        if rests or not self.requests:
            self._watch.pause()
        if rests:
            self.stand_aside()
        return outputs

    def count(self, outputs: Any) -> int:
        """Counts the request steps of a step, and returns the number of its tokens."""
        num_emitted = 0
        for engine_outputs in outputs.values():
            for core_output in engine_outputs.outputs:
                if core_output.new_token_ids:
                    num_emitted += len(core_output.new_token_ids)
                    self._num_steps += core_output.prefill_stats is None
        if self._num_steps != self._emitted.num_steps:
            self._emitted = Emitted(self._num_steps, self._emitted.dropped)
        return num_emitted

    def _drop(self, outputs: Any, rows: dict[str, int], num_sampled: list[int]) -> None:
        all_outputs = (core_output for engine_outputs in outputs.values() for core_output in engine_outputs.outputs)
        emitted = {core_output.request_id: len(core_output.new_token_ids) for core_output in all_outputs}
        for request_id, row in rows.items():
            positions = range(max(1, emitted.get(request_id, 0)) - 1, num_sampled[row] - 1)
            self._dropped.update(positions)
            self._to_report.update(positions)
        dropped = tuple(self._dropped[position] for position in range(1 + max(self._dropped, default=-1)))
        if dropped != self._emitted.dropped:
            self._emitted = Emitted(self._num_steps, dropped)

    def correct_report(self, model_runner_output: Any) -> None:
        """Corrects the worker's report, if this output has one."""
        sent = model_runner_output.ec_connector_output
        if sent is not None and sent.ec_connector_stats and REPORT in sent.ec_connector_stats.data:
            self._correct(sent.ec_connector_stats.data[REPORT])

    def _correct(self, report: dict[str, Any]) -> None:
        """Subtracts the dropped tokens that the report contains; counts from the device arrive later."""
        report[key("steps")] = self._num_steps - self._num_reported
        self._num_reported = self._num_steps
        for position in list(self._to_report):
            all_series = (series for series in report if series.startswith(_BY_POSITION + SEPARATOR))
            matches = [series for series in all_series if series.endswith(f"{SEPARATOR}{position}")]
            for series in sorted(matches, key=report.__getitem__, reverse=True):
                num = min(report[series], self._to_report[position])
                report[series] -= num
                if num:
                    report[key("num_accepted_tokens", series.split(SEPARATOR)[1])] -= num
                self._to_report[position] -= num
        self._to_report = +self._to_report

    def _update_session(self, request: Any, new_token_ids: list[int], *is_stale: Any, **kw: Any) -> Any:
        """Continues a session after its last emitted token; vLLM's synchronous scheduler would also count dropped
        tokens."""
        session, num_sampled = request, len(new_token_ids)
        result = super()._update_request_with_output(request, new_token_ids, *is_stale, **kw)  # type: ignore[misc]
        if session.resumable and not session.num_output_placeholders:
            session.num_computed_tokens -= num_sampled - len(result[0])
        return result

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        self.send_totals(news_of(scheduler_output))

    def send_totals(self, news: StepNews) -> None:
        news.emitted = self._sent = self._emitted
        news.sums = self._watch.taken()

    def has_finished_requests(self) -> bool:
        """Returns True also until the worker has received the last totals, which takes an empty step with asynchronous
        scheduling."""
        return self._sent is not self._emitted or super().has_finished_requests()  # type: ignore[misc]
