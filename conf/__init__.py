"""Hydra configurations: primary configs, groups, and the runs of each domain."""
