"""Lower bounds: the least time that any plan could take."""
