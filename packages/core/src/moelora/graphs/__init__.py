"""How a packed batch is run: the runner contract, and one file per way of running."""
