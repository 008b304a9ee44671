"""The race for one token of a row of which each group's weight is known: opens only groups that can win."""
