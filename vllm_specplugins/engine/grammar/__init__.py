"""What a request's grammar forces, as drafts: where it allows one text only, the engine's scheduler adds that text."""
