"""Model Runner V2: samples and verifies with our kernels, after a check and a warm-up."""
