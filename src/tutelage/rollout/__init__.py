"""Generation backends and the sampler they share."""
