"""The speeds of a machine, measured once and kept in the user's cache."""
