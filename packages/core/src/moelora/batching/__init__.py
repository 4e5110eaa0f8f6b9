"""Which requests go together (planner) and what the model sees of them (packing)."""
