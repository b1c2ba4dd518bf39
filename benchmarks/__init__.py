"""Every figure that the project claims, measured beside what it is compared with."""
