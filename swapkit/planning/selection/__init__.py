"""The choice of plans that a session tries and follows."""
