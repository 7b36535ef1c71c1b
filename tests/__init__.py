"""The tests. A package, so that ranks in other processes can import a test's functions."""
