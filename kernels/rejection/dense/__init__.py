"""Modified rejection sampling with draft logits: acceptance by p / q, tokens recovered from max(p - q, 0)."""
