"""Operations on tensors: one folder each, with an eager reference beside its Triton kernel. Knows nothing of ours."""
