"""Recipe for the tiny mixture-of-experts checkpoint under `examples/tiny-moe`; run it with `make_tiny_moe.py`."""
