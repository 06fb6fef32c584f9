"""One model on several ranks: cut rows (context, sequence) and cut matrices (tensor)."""
