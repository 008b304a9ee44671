"""A model behind another server drafts."""
