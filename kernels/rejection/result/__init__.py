"""How verdicts on a request's rows become its result."""
