"""Metrics that are exact across ranks and uneven last batches."""
