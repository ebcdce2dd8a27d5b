"""Compatibility with other systems' import paths; each module takes effect only if imported."""
