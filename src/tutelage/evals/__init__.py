"""Held-out quality: losses, pair accuracy, and answers scored by proxy and gold reward."""
