"""Draft trees on Model Runner V2: masks and positions before the target runs; the walk and moves of K/V after it."""
