"""Moving rows without arithmetic: copies, writes and shifts along the first axis of activations and state pools."""
