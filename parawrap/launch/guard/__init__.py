"""The process of a machine that starts ranks, sees how they end, and ends what they leave behind."""
