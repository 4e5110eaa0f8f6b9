"""Adapters: config parsing, one file per on-disk layout, the loader into canonical form, the device bank."""
