"""Where a call on a role runs: directly (`local`) or nowhere at all (`recording`)."""
