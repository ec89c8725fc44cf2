"""Domain collections. Each lives in collections/<domain> of the repository and is linked here by name."""
