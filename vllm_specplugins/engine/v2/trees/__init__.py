"""Draft trees on Model Runner V2: masks and positions before the target runs, the walk and the moves of keys and values
after it."""
