"""Traces, machines, plans, and what a session did: frozen dataclasses, independent of torch."""
