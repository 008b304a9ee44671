"""Trials of drafts that a rule does not expect to pay off. They show where text has changed."""

EXPLORE_EVERY = 12  # steps, at least, between two trials of a stage that does not pay
EXPLORE_SHARE = 0.01  # of the time, at most, goes to one kind of trial
GOOD_ACCEPTANCE = 0.75  # probability for text that suits a stage, whatever the record of other text says


def steps_between(trial_ms: float, step_ms: float) -> float:
    """Returns the steps between trials that together take EXPLORE_SHARE of the time."""
    return trial_ms / step_ms / EXPLORE_SHARE
