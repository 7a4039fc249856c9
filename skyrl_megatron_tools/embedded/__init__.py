"""The embedded run: a tiny model that is made, warmed up and trained on two CPU cores."""
