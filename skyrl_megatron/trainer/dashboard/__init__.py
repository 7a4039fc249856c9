"""A run as a page: what its folder holds, read while it grows, and shown without anything from elsewhere."""
