"""A model behind another server drafts: the proposer, the server, and the forms of questions and answers."""
