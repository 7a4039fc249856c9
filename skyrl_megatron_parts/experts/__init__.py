"""Experts: which rank holds which one, how evenly they are used, and how they move between ranks."""
