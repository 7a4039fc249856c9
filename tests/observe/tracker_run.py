"""Three lives of a run for its tracker, by its own client: ``tracker_run.py {write,read} NAME LOG_PATH``.

``write``: the first takes steps 1 to 3, the second continues after step 2, the third begins anew. ``read``, once that
process has ended (wandb writes until then), prints what the tracker's own files hold, as JSON: by run id, rewards as
[step, value], tables of samples, the seed of the configuration.
"""

import glob
import json
import struct
import sys
from pathlib import Path


def main():
    what, name, log_path = sys.argv[1:]
    if what == "read":
        print("READ " + json.dumps(READERS[name](Path(log_path))), flush=True)
        return
    for steps, resumed in ((range(1, 4), False), (range(3, 5), True), (range(1, 2), False)):
        life(name, log_path, steps, resumed)


def life(name, log_path, steps, resumed):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron_observe.trackers import named_trackers

    keys = {"trainer.log_path": log_path, "trainer.run_name": "run", "trainer.project_name": "seen"}
    cfg = SkyRLTrainConfig.from_cli_overrides({**keys, "trainer.logger": name, "trainer.seed": 7})
    [tracker] = named_trackers(cfg, resumed=resumed)
    for step in steps:
        tracker.samples([("u1", 0.5, "stop", "2+2=", f"{step}"), ("u1", None, "", "2+2=", "5")], step)
        tracker.log({"reward/avg_raw_reward": step / 10, "policy/broken": float("nan")}, step)
    tracker.finish()


def records(path):
    """Return the payloads of a file in LevelDB's log format (seven bytes before: name and version)."""
    data, place, found, partial = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        partial += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(partial)
            partial = b""
    return found


def read_wandb(log_path):
    from wandb.proto.wandb_internal_pb2 import Record

    runs = {}
    for path in sorted(glob.glob(f"{log_path}/seen/run/wandb/offline-run-*/*.wandb")):
        metrics, config, samples, run_id = [], {}, 0, None
        for payload in records(Path(path)):
            record = Record.FromString(payload)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run_id = record.run.run_id
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if kind == "history":
                line = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                metrics.append([line.get("trainer/global_step"), line.get("reward/avg_raw_reward")])
                samples += any(key.startswith("samples") for key in line)
        run = runs.setdefault(run_id, {"reward": [], "samples": 0, "seed": None})
        run["reward"] += metrics
        run["samples"] += samples
        run["seed"] = config.get("trainer", {}).get("seed", run["seed"])  # a file may hold a later part of the run
    return {"runs": runs}


def read_mlflow(log_path):
    from mlflow import MlflowClient

    client, runs = MlflowClient(), {}
    experiment = client.get_experiment_by_name("seen").experiment_id
    for run in client.search_runs([experiment]):
        run_id = run.info.run_id
        history = client.get_metric_history(run_id, "reward/avg_raw_reward")
        runs[run_id] = {
            "reward": sorted([item.step, item.value] for item in history),
            "samples": len(client.list_artifacts(run_id, "samples")),
            "seed": int(run.data.params["trainer.seed"]),
            "status": run.info.status,
            "run_name": run.info.run_name,
        }
    return {"runs": runs}


def read_swanlab(log_path):
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    runs = {}
    for path in sorted(Path(f"{log_path}/seen/run/swanlog").rglob("*.swanlab")):
        for payload in records(path):
            record = Record.FromString(payload)
            kind = record.WhichOneof("record_type")
            run = runs.setdefault(path.parent.name.rpartition("-")[2], {"reward": [], "samples": 0})
            if kind == "scalar" and record.scalar.key == "reward/avg_raw_reward":
                run["reward"].append([record.scalar.step, round(record.scalar.value.number, 6)])
            run["samples"] += kind == "media"
            run["finished"] = kind == "finish"
        run["seed"] = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())["trainer"]["value"]["seed"]
    return {"runs": runs}


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "swanlab": read_swanlab}

if __name__ == "__main__":
    main()
