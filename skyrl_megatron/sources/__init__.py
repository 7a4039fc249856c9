"""Where the groups of a step come from: sampled, oversampled, streamed or replayed."""
