"""Launches on a Ray cluster."""
