"""Where sharding engines agree with one process, and where they don't. `peers` is the command."""
