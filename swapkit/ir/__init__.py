"""The values that planning works on: plain frozen dataclasses, independent of torch."""
