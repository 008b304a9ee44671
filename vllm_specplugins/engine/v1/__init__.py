"""The adapter for Model Runner V1, with one file per task."""
