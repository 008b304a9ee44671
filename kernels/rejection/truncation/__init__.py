"""Which tokens top-k, top-p and min-p keep: each row's smallest logit that survives, without a sort of the row."""
