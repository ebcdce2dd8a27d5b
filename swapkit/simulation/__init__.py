"""What a step under a plan comes to."""
