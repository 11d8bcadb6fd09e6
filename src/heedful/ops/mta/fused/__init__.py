"""Multi-token attention as Triton kernels; only `plan` can be imported without Triton."""
