"""What is promised on an NVIDIA GPU, proven where one is at hand: `make gpu`. See README.md."""
