"""Everything that touches vLLM. No other package imports it."""
