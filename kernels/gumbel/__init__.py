"""Sampling whose noise depends on (seed, position, token) alone: the Gumbel-max trick with counter-based bits."""
