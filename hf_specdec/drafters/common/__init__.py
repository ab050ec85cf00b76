"""What drafters of several methods share."""
