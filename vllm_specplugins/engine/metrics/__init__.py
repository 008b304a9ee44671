"""Metrics of speculation on vLLM's /metrics. The worker sends its counts in vLLM's field for statistics of
encoder-cache connectors, for at most 0.5 % of the time; if the engine has such a connector, the counts appear in the
log only. The front end exports them beside vLLM's metrics.
"""
