"""Model Runner V1: one file for each thing that an adapter does."""
