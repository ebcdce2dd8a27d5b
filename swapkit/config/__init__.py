"""Settings from outside the program: flags, environment variables, documents."""
