"""The loop and what it stands on: rows, caches, processors over a block, stops inside a block."""
