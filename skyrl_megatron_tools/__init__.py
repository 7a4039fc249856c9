"""Commands around a run: doctor, replay, mismatch, clusters, engines on other hosts, the embedded run."""
