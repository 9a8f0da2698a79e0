"""embedding: rows of the token embedding table, as float32.

`prepare_embedding(PlainEmbedding | QuantizedEmbedding) -> handle`; `embed(ids, handle)`: int32 [R] -> float32
[R, hidden]. Plain rows widen exactly; quantized rows are rings of 256, rotated back (docs/arithmetic.md, *embedding*).
The table stays where it lies, also in a mapped file: only the rows asked for are read.
"""
