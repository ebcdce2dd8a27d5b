"""Plans by policy (`planner`), lower bounds for them, and what a session does next."""

POLICIES = ("auto", "swap", "recompute")  # that make plans
