"""Triton and CSGMV backends for moelora: one folder per op under `ops/`."""
