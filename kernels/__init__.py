"""Contains operations on tensors, each in a folder with an eager reference and its Triton kernel. They import nothing
else of this package."""
