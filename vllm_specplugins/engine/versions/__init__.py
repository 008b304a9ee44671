"""Which names of vLLM we touch, and whether a version has them."""
