"""Which plan a session tries next, and which one it follows."""
