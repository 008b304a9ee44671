"""Model Runner V2: one file for each thing that an adapter does."""
