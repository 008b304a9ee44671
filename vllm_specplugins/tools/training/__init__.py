"""Training of the small parts that draft on a frozen model's states.

`kinds.py` says what a part drafts from; `core.py` trains, saves and resumes any. Drafts are unrolled over a whole row
at once, as they are when served: pass k sees of the text what stands k tokens or more before it, and between that what
the draft itself has written. What is printed as tokens a step is what an engine measures (`scores.py`): the model goes
on with held-out beginnings, with the noise that verification draws with, and a step begins after what was accepted.
"""
