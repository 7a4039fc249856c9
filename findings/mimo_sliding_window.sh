#!/usr/bin/env bash
# transformers 5.24.0: sliding_window of a MiMo-V2-Flash configuration is not the value in its config.json.
#
# Where the file has sliding_window_size, as the published folder does, the attribute becomes that number plus one: the
# query counts as one of the tokens that it sees. The attribute is 129 for a file in which both keys are 128, and
# save_pretrained writes 129 beside 128. Releases up to 5.19 keep 128. vLLM 0.32.0 reads sliding_window_size, so a
# program that takes sliding_window from the loaded configuration has a window of one token more than the engine.
#
# Seen on Python 3.12: 5.19.0 reads 128 and writes 128, 128; 5.24.0 reads 129 and writes 129, 128.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.19.0 5.24.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
  "$folder/$version/bin/python" - "$folder" "$version" <<'PYTHON'
import json
import os
import sys

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
from transformers import AutoConfig

folder, version = sys.argv[1:]
with open(f"{folder}/config.json", "w") as file:
    json.dump({"model_type": "mimo_v2_flash", "sliding_window": 128, "sliding_window_size": 128}, file)
config = AutoConfig.from_pretrained(folder)
config.save_pretrained(f"{folder}/{version}/again")
with open(f"{folder}/{version}/again/config.json") as file:
    written = json.load(file)
seen = [config.sliding_window, written["sliding_window"], written["sliding_window_size"]]
print(version, "read, written sliding_window, written sliding_window_size:", seen)
assert seen == {"5.19.0": [128, 128, 128], "5.24.0": [129, 129, 128]}[version], "this has changed"
PYTHON
done
