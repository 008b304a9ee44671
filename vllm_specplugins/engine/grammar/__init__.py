"""Drafts from grammars: the scheduler appends the text that a request's grammar forces to its draft."""
