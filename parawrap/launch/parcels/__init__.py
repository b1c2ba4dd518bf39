"""What travels between a launch and its ranks: calls, messages, results, and exceptions with what was known of them."""
