"""Plans, and how good a plan could be."""
