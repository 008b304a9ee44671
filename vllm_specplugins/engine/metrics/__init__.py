"""What operators see of speculation on vLLM's own /metrics, and the way there from the worker.

The worker's counts travel in the field that vLLM has for the statistics of encoder-cache connectors, at most 0.5 % of
the time; where such a connector is configured they stay in the log. The front end exports them beside vLLM's own.
"""
