"""Drafts from grammars: the scheduler appends to a draft the text that the request's grammar forces."""
