"""Writers for the formats that serving engines read."""
