"""Environments of other packages, tools and task folders."""
