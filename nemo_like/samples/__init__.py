"""Small free corpora that ship with the package."""
