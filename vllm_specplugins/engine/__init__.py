"""Contains all code that uses vLLM. No other package imports vLLM."""
