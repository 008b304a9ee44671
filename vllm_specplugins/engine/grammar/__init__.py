"""Drafts from grammars: the scheduler adds the text that a request's grammar forces to its draft."""
