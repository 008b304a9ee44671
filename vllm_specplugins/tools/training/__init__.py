"""Trains small parts that draft from the states of a frozen model. Drafts are unrolled over a whole row at once, as in
serving: pass k sees the text up to k tokens before a token, and then the passes of its draft."""
