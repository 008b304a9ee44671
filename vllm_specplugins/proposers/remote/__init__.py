"""A model behind another server drafts: the proposer, the server that it asks, and what questions are made of."""
