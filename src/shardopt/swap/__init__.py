"""Optimizers whose state lives in host memory, and the kernels that step it there."""
