"""What planning works on: plain frozen values, without torch."""
