"""Exports metrics of speculation on vLLM's /metrics. The worker sends its counts in vLLM's field for statistics of
encoder-cache connectors, for at most 0.5 % of the time. If the engine has such a connector, the counts appear only in
the log. The front end exports them with vLLM's metrics.
"""
