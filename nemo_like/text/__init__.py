"""Tokenizers and text normalisation."""
