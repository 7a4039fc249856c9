"""Parts that a rank has only if a setting asks for them."""
