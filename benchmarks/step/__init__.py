"""The time, traffic and memory of a training step."""
