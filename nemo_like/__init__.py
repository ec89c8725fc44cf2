"""One framework from corpus to deployed model, for text, speech and vision."""

__version__ = "0.1.0"
