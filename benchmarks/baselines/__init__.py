"""What Shardwright is measured against, each set up as its documentation says."""
