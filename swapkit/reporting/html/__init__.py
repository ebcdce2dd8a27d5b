"""The report of a session as one HTML page that works offline, and as a small card."""
