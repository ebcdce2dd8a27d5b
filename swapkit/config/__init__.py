"""Settings that come from outside the program."""
