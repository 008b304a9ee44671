"""Outputs of earlier requests, with a fast search for the longest match of a request's newest tokens. Texts lie in a
ring, in which new texts overwrite the oldest. For 1, 2, 4 and 8 tokens a table gives their latest place, and links lead
to earlier places. The 16 latest places of the longest n-gram vote for the draft's tokens. The ring allocates its memory
at the start, 80 bytes per token. A file receives the same texts in the same order, and a Redis stream the texts that
engines share."""
