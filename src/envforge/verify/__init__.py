"""Runs inside the image: standard library and the stack only, nothing else of envforge."""
