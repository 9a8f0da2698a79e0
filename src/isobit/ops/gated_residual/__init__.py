"""Gated residual streams: S parallel copies of the residual, read through a learned mix and written by injections.

Read: each stream is normed; low = silu(down(normed) / S); mix = sigmoid(up(low)); the block's input is the mean over
streams of mix * normed, and its injection 2 * sigmoid(inject(normed) / S), one scalar a stream (none at a site without
`inject`, which only collapses the streams). Write: stream s += injection_s * y.

streams: float32 [R, S, H]; input, y: float32 [R, H]; injection: float32 [R, S]. Rounded as docs/arithmetic.md says.
"""
