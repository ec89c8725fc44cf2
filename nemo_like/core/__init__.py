"""The floor everything stands on: model and data contracts, configuration, checkpoints, errors."""
