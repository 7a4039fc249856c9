#!/usr/bin/env bash
# Ray 2.60.0: a driver whose object store fills up runs gc.collect() in a thread of Ray's, although gc.disable() was called.
#
# The raylet asks all workers, the driver too, to collect garbage when its store is more than 70 % full, at most every 10 s;
# each collects all generations in a thread named PythonGCThread. That holds the GIL: 0.14 s over the 265,000 objects that
# torch, transformers and ray leave after their import, and blocks every event loop of the process. gc.disable() has no
# effect on it; after gc.freeze() the same call takes 10 µs.
#
# Seen on Python 3.11 and 3.12 with ray 2.60.0: first collection after 23 s of one put a second, of 20 MiB into 200 MiB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ray==2.60.0 numpy
cat > "$folder/driver.py" <<'PYTHON'
import gc
import threading
import time

import numpy as np
import ray

collected = []


def note(phase, info):
    if phase == "start":
        collected.append((threading.current_thread().name, info["generation"]))


gc.disable()
ray.init(num_cpus=1, object_store_memory=200 << 20, include_dashboard=False, logging_level="ERROR")
gc.callbacks.append(note)
kept, end = [], time.monotonic() + 120
while not collected and time.monotonic() < end:
    kept = [*kept, ray.put(np.zeros(20 << 20, np.uint8))][-8:]  # 80 % of the store
    time.sleep(1)
objects = [[number] for number in range(1_000_000)]
times = []
for freezes in (False, True):
    if freezes:
        gc.freeze()
    began = time.monotonic()
    gc.collect()
    times.append(time.monotonic() - began)
print("with gc.disable():", collected[:1], f"one over {len(objects):,} lists {times[0]:.3f} s, frozen {times[1]:.5f} s")
assert collected[:1] == [("PythonGCThread", 2)] and times[1] < times[0] / 10, "this has changed"
PYTHON
"$folder/venv/bin/python" "$folder/driver.py"
