"""What operators see of speculation on vLLM's own /metrics, and the way there from the worker."""
