"""Episodes of several turns: a policy answers, an environment replies, and both are one response with holes."""
