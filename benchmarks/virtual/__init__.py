"""Training in many ways on a virtual GPU: the command is `make virtual`."""
