"""What transformers looks for in flash-linear-attention, in plain torch; for tests with a process of their own."""
