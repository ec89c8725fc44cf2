"""The nemo-like command."""
