"""Plans for all stages of a pipeline together."""
