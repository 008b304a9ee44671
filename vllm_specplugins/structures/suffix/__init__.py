"""Stores outputs of earlier requests, and searches them for the longest match of a request's newest tokens. The texts
are in a ring, in which new texts overwrite the oldest. For n-grams of 1, 2, 4 and 8 tokens a table has the latest
occurrence, and links lead to earlier ones. The 16 latest occurrences of the longest matching n-gram vote on the draft's
tokens. The ring allocates its memory at the start, 80 bytes per token. A file receives the same texts in the same
order, and a Redis stream the texts that engines share."""
