"""The search for a plan, starting from the solution of the bound."""
