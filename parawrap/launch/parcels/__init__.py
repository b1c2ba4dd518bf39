"""Data that travels between a launch and its ranks: calls, messages, results, and exceptions."""
