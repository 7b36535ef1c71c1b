"""Runs the command line with `python -m shardwright.app.cli`."""

from shardwright.app.cli import main

if __name__ == "__main__":
    main()
