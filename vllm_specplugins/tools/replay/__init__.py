"""`replay` plays recorded traffic to proposers that read token ids, without a model."""
