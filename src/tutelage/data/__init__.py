"""Data: sources, formats, chat templates, preflight, splits, packing and the sampler."""
