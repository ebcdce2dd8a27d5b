"""Configuration documents of MindFormers: reading, checking, what they ask for in each layer."""
