"""`bench`: how much faster speculation makes a model here, by method, kind of text, and requests at a time."""
