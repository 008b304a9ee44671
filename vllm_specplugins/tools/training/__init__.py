"""Training of small parts that draft from the states of a frozen model. Drafts are unrolled over a whole row at once,
as they are when served: pass k sees the text up to k tokens before a token, and after that the passes of its draft."""
