"""The engine: torch begins here. Public names are re-exported by `shardwright` itself."""
