"""Data sent between the launching process and its ranks: calls, messages, results, and exceptions."""
