"""Where a call on a role runs: in this process (`local`), on groups of processes (`ray`), nowhere (`recording`)."""
