"""A simulated CUDA device for vLLM's Model Runner V2, on a machine without one. See README.md."""
