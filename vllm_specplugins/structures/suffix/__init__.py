"""Outputs of earlier requests, kept so that the longest match of what is being generated is found at once.

They lie in a ring, in which new texts overwrite the oldest. For 1, 2, 4 and 8 tokens a table gives the place where they
stood last, and links lead from there to earlier places; what was overwritten is known by its tokens, so nothing is ever
taken out. Counts are taken when asked, not kept: the last 16 places of the longest n-gram vote, token by token. The
acceptance probability of a token is learned by source, length of match and share of votes. Beside each token lies its
owner, which is hashed and compared with it. Memory is taken at the start, 80 bytes a token. A file is appended to as
the ring is, so that its last part is what the ring holds.
"""
