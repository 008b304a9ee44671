"""Training of the small parts that draft on a frozen model's states."""
