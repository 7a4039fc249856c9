"""New weights, from the ranks of the trainer to the workers of all engines."""

DEFAULT_BUCKET_BYTES = 16 << 20
