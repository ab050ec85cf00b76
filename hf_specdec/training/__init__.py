"""Training drafters: data from the target itself, and one module for each method."""
