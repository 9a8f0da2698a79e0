"""Grouped-query attention over the keys that a block indexer selects (docs/arithmetic.md, section sparse_attention).

For R rows: `attention_write` norms, rotates and stores the rows' keys (float32 [R, kv_heads * head_dim]), stores their
values (the same shape) and raw index keys (float32 [R, index_dim]), and pools every block of `block` index keys that a
row finishes. `attention_select` (index queries, float32 [R, index_heads * index_dim]) scores each row's finished blocks
and keeps the best budget / block. `attention_read` (queries and gates, float32 [R, heads * 2 * head_dim], interleaved
per head) attends over the selected blocks and the unfinished tail and gives float32 [R, heads * head_dim], gated.

Keys and values are kept as binary16, index keys as float32, in pages of PAGE_ROWS rows (`isobit.ops.batch`).
"""
