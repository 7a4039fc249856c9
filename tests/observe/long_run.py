"""The metrics of a long run, written quickly."""

import json
import random


def write_long_run(folder, steps, names=120):
    """A folder whose ``metrics.jsonl`` has so many steps; of ``policy/grad_norm`` one value is large."""
    from tests.observe.made_run import metrics

    run = folder / "skyrl" / "long"
    run.mkdir(parents=True)
    rng = random.Random(1)
    first = metrics(1, steps, rng)
    known = dict.fromkeys(first) | {f"environment/made_{number}": None for number in range(names - len(first))}
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {name: rng.random() for name in known}
            line["policy/grad_norm"] = 1e6 if step == steps // 2 + 1 else line["policy/grad_norm"]
            file.write(json.dumps({"step": step, **line}) + "\n")
    return run
