"""Trees of drafts on Model Runner V2: masks and positions before the target runs, the walk after it, the K/V moved."""
