"""Multi-round rejection sampling of a node's children in a tree of sampled drafts (Miao et al. 2024, "SpecInfer",
algorithm 2). Siblings are drawn from one q without replacement, so the i-th sibling follows q without the earlier ones.
They are tried in turn: sibling x is accepted with probability min(1, r(x) / q(x)). At first r is p; each rejection
replaces it by max(r - q, 0), normalised. If none is accepted, a token is drawn from the last r. Each node's outcome is
one token, which `trees.walk` follows. It is distributed as p for any q. The number of a node's siblings must not depend
on the siblings. N: nodes with children, C: siblings, V: vocabulary."""
