"""Builds what a plan describes: rendering, build context, engines, registry."""
