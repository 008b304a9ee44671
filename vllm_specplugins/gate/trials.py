"""Limits trials of drafts that a rule does not expect to pay off. Trials show whether text has changed."""

EXPLORE_EVERY = 12  # fewest steps between two trials of a stage that does not pay off
EXPLORE_SHARE = 0.01  # largest share of the time for one kind of trial
GOOD_ACCEPTANCE = 0.75  # acceptance probability for text that suits a stage, independent of the record of other text


def steps_between(trial_ms: float, step_ms: float) -> float:
    """Returns the steps between trials that together take EXPLORE_SHARE of the time."""
    return trial_ms / step_ms / EXPLORE_SHARE
