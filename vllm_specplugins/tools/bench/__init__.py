"""`bench` measures how much faster speculation serves a model here, by method, kind of text and number of requests."""
