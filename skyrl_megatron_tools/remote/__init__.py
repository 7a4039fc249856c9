"""Engines and teachers on other hosts."""
