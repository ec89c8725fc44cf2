"""Domain-free data pipelines: streaming, shards, packing, mixtures, exact order."""
