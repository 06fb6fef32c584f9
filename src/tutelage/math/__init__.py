"""Pure tensor functions: no I/O, no configuration, no randomness that is not passed in. Import from the modules."""
