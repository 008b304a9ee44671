"""Earlier texts, kept so that the longest match of what is being generated is found at once.

The suffix store keeps texts in pages. For 1, 2, 4 and 8 tokens a table gives the place where they stood last, and
links lead from there to earlier places; a place enters the next longer chain once there are two in the shorter one.
Counts are taken when asked, not kept: the last 16 places of the longest chain vote, token by token, so that a removed
text takes its counts with it. The acceptance probability of a token is learned by source, length of match and share of
votes. A request's own text has tables of its own, small enough for the caches. In the store the tenant is part of what
is hashed and compared, and a tenant over its share evicts itself. Memory is taken at the start, 80 bytes a token.
"""
