"""`replay`: recorded traffic, played through history proposers without a model."""
