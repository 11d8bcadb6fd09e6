"""The convolution and the softmax of multi-token attention in Triton; imported with it only."""
