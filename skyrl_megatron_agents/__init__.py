"""Agents that drive their own loop: gateway, sandboxes, environments of other packages."""
