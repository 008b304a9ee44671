"""One read of the logits, target's and draft's: what each group of tokens weighs."""
