"""The convolution of multi-token attention in Triton; only `plan` can be imported without it."""
