"""Lower bounds of the time of any plan."""
