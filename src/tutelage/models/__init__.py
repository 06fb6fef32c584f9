"""Models: loading, heads, padding-free attention, LoRA, packed forward passes. Import from the modules."""
