"""Configuration documents of MindFormers: reading, checking, and the actions for each layer."""
