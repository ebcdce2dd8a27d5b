"""Planning, and lower bounds for plans."""
