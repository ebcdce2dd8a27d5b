"""Steps in the Trace Event Format, for viewers of traces."""
