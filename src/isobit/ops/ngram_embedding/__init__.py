"""The n-gram embedding (PLE): hashed n-gram rows gathered from a mapped table and injected into the residual streams.

Ids: head h of the n-grams of n tokens hashes the row's token and its n - 1 predecessors, id = (xor of token_i *
multiplier_i, in wrapping int64) mod size_h + offset_h. A predecessor beyond an earlier end token, or before the
stream's start, reads as the end token; an end token itself still sees its predecessors.

Gather: the table's row of each id, plus the head's bias; rows are read where they are mapped, and no others.

Inject, per stream: gate = signed root of the normed key's and stream's product; gated = sigmoid(gate) * value;
stream += gated + silu(dilated causal convolution of the normed gated value).

State: the token history, int32 [slots, order - 1], most recent first (the end token where nothing came before), and
the convolution's pool, float32 [slots, dilation * (taps - 1), S*H]. Rounded as docs/arithmetic.md says.
"""
