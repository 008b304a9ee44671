"""Operations on tensors: one folder each, with an eager reference beside its Triton kernel. They import nothing else of
this package."""
