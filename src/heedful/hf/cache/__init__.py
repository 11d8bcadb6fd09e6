"""The KV cache of a converted model: one attention layer's cache, in parts with one duty each."""
