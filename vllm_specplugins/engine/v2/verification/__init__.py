"""Model Runner V2: samples and verifies with our kernels, which are checked and warmed up before they serve."""
