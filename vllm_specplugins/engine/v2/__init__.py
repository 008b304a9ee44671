"""The adapter for Model Runner V2, with one file per task."""
