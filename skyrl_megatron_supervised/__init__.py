"""Training on rows of data: conversations, preferences and scores."""
