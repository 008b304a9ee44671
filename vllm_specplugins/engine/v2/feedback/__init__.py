"""Model Runner V2: what became of drafts, counted on the device and read on the host one step later."""
