"""The layers of the served model as callables."""
