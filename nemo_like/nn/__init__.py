"""Network blocks that two or more domains use."""
