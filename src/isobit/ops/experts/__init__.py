"""experts: the mixture of experts behind a router, and the shared expert beside it.

`route(logits, chosen, renormalise) -> (ids, weights)`: float32 [R, E] -> int32 [R, chosen] ascending, float32.
`prepare_experts(gate, up, down, shared_gate, shared_up, shared_down, shared_expert_gate) -> handle`: host weights, the
first three one list entry an expert; formats and widths may differ between experts and projections.
`experts(x, ids, weights, handle)`: float32 [R, H] -> float32 [R, H]. The arithmetic is docs/arithmetic.md, *experts*.

grouping.py sorts the rows by expert, product.py computes them with the kernels of the linear op.
"""
