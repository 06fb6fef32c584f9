"""Reward sources: a reward model, rule functions, and their weighted mix."""
