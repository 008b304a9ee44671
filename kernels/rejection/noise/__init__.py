"""The random bits of verification: streams that depend on (request seed, position, counter) alone."""
