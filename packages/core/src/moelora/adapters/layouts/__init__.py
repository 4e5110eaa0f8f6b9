"""On-disk layouts: one file per family, each of which turns its tensors into plans for the canonical factors."""
