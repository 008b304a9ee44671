"""Model Runner V2: samples and verifies with the plugin's kernels, after a check and a warm-up."""
