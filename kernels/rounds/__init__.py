"""Multi-round rejection sampling of a node's children in a tree of sampled drafts (Miao et al. 2024, "SpecInfer",
algorithm 2). Siblings are drawn from one q without replacement, so the i-th follows q without those before it. They are
tried in turn: sibling x is accepted with probability min(1, r(x) / q(x)), where r is p at first, and after a rejection
max(r - q, 0), normalised. A token of the last r follows if none is accepted. Each node's outcome is one token, which
`trees.walk` follows, and which is distributed as p whatever q is. How many siblings a node has must not depend on any
of them. N: nodes with children, C: siblings, V: vocabulary."""
