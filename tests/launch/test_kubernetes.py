"""``launch/kubernetes/rayjob.yaml`` against the schemas of KubeRay and Kubernetes, and against its recipe."""

import json
import re
from pathlib import Path

import pytest
import yaml

from skyrl_megatron.config.parse import RECIPES

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "launch" / "kubernetes" / "rayjob.yaml"


@pytest.fixture(scope="module")
def problems():
    """What KubeRay's schema, of which tests/data says the version, finds wrong in a manifest."""
    from jsonschema import Draft202012Validator

    schema = json.loads((ROOT / "tests" / "data" / "rayjob.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    return lambda manifest: [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


@pytest.fixture
def job():
    return yaml.safe_load(FILE.read_text())


def test_manifest_is_valid(problems, job):
    assert problems(job) == []


MISTAKES = {
    "replica": lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(replica=2),
    "groupName": lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
    "num-gpus": lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),
    "submissionMode": lambda spec: spec.update(submissionMode="K8sMode"),
    "containers": lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].pop("containers"),
    "medium": lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"][1][
        "emptyDir"
    ].update(medium=1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_schema_sees_mistakes(problems, job, mistake):
    wrong = json.loads(json.dumps(job))  # no two places share an anchor
    MISTAKES[mistake](wrong["spec"])
    found = problems(wrong)
    assert len(found) == 1 and mistake in found[0], found


def test_the_job_asks_for_what_its_recipe_needs(job):
    words = job["spec"]["entrypoint"].split()
    script = words[0].removeprefix("/opt/skyrl-megatron/")
    assert (ROOT / script).exists()
    recipe = yaml.safe_load((RECIPES / f"{words[words.index('--recipe') + 1]}.yaml").read_text())
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    placement = recipe["trainer"]["placement"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == placement["policy_num_nodes"]
    gpus = placement["policy_num_gpus_per_node"]
    assert int(group["rayStartParams"]["num-gpus"]) == int(container["resources"]["limits"]["nvidia.com/gpu"]) == gpus


def test_its_keys_are_keys_of_the_configuration(job):
    from skyrl_megatron.config import SkyRLTrainConfig

    keys = [word for word in job["spec"]["entrypoint"].split() if "=" in word and not word.startswith("model=")]
    cfg = SkyRLTrainConfig.from_cli_overrides(keys)
    shared = {
        mount["mountPath"]
        for mount in job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0][
            "volumeMounts"
        ]
    }
    for path in (cfg.trainer.ckpt_path, cfg.trainer.export_path, cfg.trainer.log_path, *cfg.data.train_data):
        assert any(path.startswith(f"{folder}/") for folder in shared), path


def test_ray_and_images_are_this_version(job):
    cluster = job["spec"]["rayClusterSpec"]
    lock = (ROOT / "launch" / "requirements" / "gpu.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in lock
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    images = re.findall(r"image: (?:&\S+ )?(skyrl-megatron:\S+)", FILE.read_text())
    assert images == [f"skyrl-megatron:{version}-cuda"]
