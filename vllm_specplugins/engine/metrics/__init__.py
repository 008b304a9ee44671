"""Speculation's metrics on vLLM's /metrics.

The worker sends its counts in vLLM's field for statistics of encoder-cache connectors, for at most 0.5 % of the time;
with such a connector they only appear in the log. The front end exports them beside vLLM's metrics.
"""
