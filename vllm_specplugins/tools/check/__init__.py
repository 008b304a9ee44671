"""`check`: a proposer of the user's own against a recorded engine."""
