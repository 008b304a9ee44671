"""Contains the parts of `verify-lossless`: a tiny model, its exact distributions, a grid of sampling parameters, and
statistics."""
