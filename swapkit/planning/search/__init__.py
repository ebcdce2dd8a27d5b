"""The search for a plan: from the bound's solution to a schedule."""
