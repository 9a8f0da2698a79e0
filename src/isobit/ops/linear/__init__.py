"""linear: y = x W + bias, for EXL3-quantized and plain weights.

`prepare_linear(Exl3Linear | PlainLinear) -> handle` once at load; `linear(x, handle)`: float32 [R, in_features] ->
float32 [R, out_features]. The arithmetic is docs/arithmetic.md, *linear*.

tiles.py decodes the stored formats, blocks.py holds rotations and the panel product, product.py the order of the sums;
one row is computed row by row, more rows in panels, with equal bytes.
"""
