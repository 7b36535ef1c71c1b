"""Measurements. Each is one command that alternates its arms on one machine and writes a file."""
