"""Real engines, timed and sampled from outside, for the tools."""
