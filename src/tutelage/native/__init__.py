"""Compiled CPU kernels: what a transformer block does besides its matrix products, in one pass over memory each."""
