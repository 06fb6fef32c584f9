"""Training backends. Import from the modules."""
