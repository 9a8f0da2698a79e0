"""The Gated DeltaNet recurrence with its short convolution before it and its gated norm after it.

A row holds Hk queries and keys of dk values and Hv values of dv; C = 2*Hk*dk + Hv*dv, in the order q, k, v. Each
query and key head serves Hv/Hk consecutive value heads. Per row and value head, in the order of the stream's rows:
S = S * exp(g); m = S^T k; S = S + k (beta * (v - m))^T; o = S^T q, with g = -exp(A_log) * softplus(a + dt_bias) and
beta = sigmoid(b); q and k are L2-normed, q is divided by sqrt(dk).

State: the recurrent pool, float32 [slots, Hv, dk, dv], and the convolution's pool, float32 [slots, taps - 1, C], the
last raw rows, oldest first. Everything is float32 and rounded as docs/arithmetic.md, section *delta_rule*, says.
"""
