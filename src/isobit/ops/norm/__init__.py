"""Root-mean-square norm: y_i = x_i / sqrt(mean(x^2) + eps) * (1 + w_i), each row by itself.

x: float32 [R, W]; weight: float32 [W]; y: float32 [R, W]. Rounded as docs/arithmetic.md, section *norm*, says.
"""
