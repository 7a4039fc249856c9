"""The main job end to end: real Ray, Megatron ranks and vLLM engine, short runs, everything they leave behind."""

import json
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.job import runs
from tests.job.runs import AGREE, GAP, until_line
from tests.job.test_routing_replay import REPLAY
from tests.support import hub_endpoint, planted
from tests.support.processes import left_behind

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * runs.TIMEOUT_S)]

MODEL, DATA = "acme/tiny", "acme/sums"
KEYS = REPLAY | {
    "trainer__policy__model__path": MODEL,
    "data__train_data": f"[{DATA}]",
    "data__val_data": f"['{DATA}:train[:4]']",
    "trainer__placement__ref_num_gpus_per_node": 1,
    "trainer__ref__megatron_config__expert_model_parallel_size": 1,
}
"""GRPO with the KL to a reference in the loss; model, tokenizer and data by their names on a hub; the trainer takes
the experts that the engine chose, with top-p and recomputed layers, on two ranks with experts on both."""


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def descendants():
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture
def folder(tmp_path):
    return runs.prepare(tmp_path)


SAYS_WHAT_IS_IMPORTED = """
import os, warnings
from skyrl_megatron.errors import SkyRLMegatronWarning
def train_steps(self):
    os.write(2, b"a library in C++ says something\\n")
    print("a library in Python says something", file=sys.stderr)
    warnings.warn("what a user should know", SkyRLMegatronWarning)
    self.cfg.trainer.placement.colocate_policy_ref = True  # from here on they take turns, as if they shared GPUs
    self.ref.offload()
    self.policy.offload()
    RayPPOTrainer.train_steps(self)
    print("away at the end:", self.ref.group.call("away"), self.policy.group.call("away"))
Trainer.train_steps = train_steps
def finish(self):
    RayPPOTrainer.finish(self)
    print("the driver imports megatron:", "megatron" in sys.modules)
Trainer.finish = finish
"""
"""All that a GPU would hold of policy and reference leaves before the first step, and returns where it is needed."""


# ------------------------------------------------------------------ a run and its continuation
@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub, and what processes that use it find in their environment (``variables``)."""
    with hub_endpoint.serve() as hub:
        home = tmp_path_factory.mktemp("hf")
        hub.variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_TOKEN": ""}
        yield hub


@pytest.fixture(scope="module")
def temporary():
    """A temporary folder of the first command's own, with a short name as sockets need it."""
    folder = Path(tempfile.mkdtemp(prefix="s-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def secrets():
    """Secrets in the environment of the first command."""
    return planted.secrets_of_all_names() | {"HF_TOKEN": hub_endpoint.TOKEN}


@pytest.fixture(scope="module")
def first(tmp_path_factory, hub, temporary, secrets):
    """The first command: two steps, an evaluation before and after them, a checkpoint and an export."""
    folder = runs.prepare(tmp_path_factory.mktemp("first"))
    files, rows = hub_endpoint.folder_files(folder / "model"), (folder / "prompts.jsonl").read_bytes()
    model, data = hub.repository(MODEL), hub.repository(f"datasets/{DATA}")
    hub.commits = {
        f"{MODEL}@main": model.push(files | {"pytorch_model.bin": b"unused"}),
        f"datasets/{DATA}@main": data.push({"train.jsonl": rows}),
    }
    before = descendants()
    kept = {"trainer__eval_before_train": "true", "trainer__eval_interval": 2, "trainer__hf_save_interval": 2}
    variables = hub.variables | secrets | {"TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
    began = time.time()
    with planted.arguments_watched(secrets) as in_arguments:
        process = runs.start(folder, SAYS_WHAT_IS_IMPORTED, variables=variables, **KEYS, **kept)
        done = runs.finish(process, folder).check()
    assert not in_arguments
    assert descendants() <= before, "a process was left behind"
    (temporary / "session_began").write_text(str(began))
    return done


@pytest.fixture(scope="module")
def again(tmp_path_factory, hub, first):
    """The same command for a third step, as after a kill between the checkpoint of step 2 and its line; the hub's
    branches have moved meanwhile."""
    folder = tmp_path_factory.mktemp("again") / "run"
    shutil.copytree(first.folder, folder)
    metrics = folder / "logs/skyrl/run/metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    hub.repository(MODEL).push({"config.json": b'{"model_type": "another"}'})
    hub.repository(f"datasets/{DATA}").push({"train.jsonl": b"not a row\n"})
    hub.asked = len(hub.requests)
    keys = KEYS | {"trainer__max_training_steps": 3, "trainer__eval_interval": 2}
    return runs.finish(runs.start(folder, variables=hub.variables, **keys), folder).check()


def test_memory_leaves_and_the_driver_has_no_megatron(first):
    assert "the driver imports megatron: False" in first.out
    assert "away at the end: [('weights', 'gradients', 'optimizer')] [(), ()]" in first.out, (
        "the reference leaves after it scored"
    )


def test_the_console(first):
    """Phases with their seconds, steps, files; library noise is in console.log."""
    warnings = [line for line in first.err.splitlines() if not line.startswith(("hub: ", "… "))]
    assert warnings == ["warning: what a user should know"]
    out, log = first.told, (first.folder / "logs/skyrl/run/console.log").read_text()
    out = [line for line in out if not line.startswith("hub: ")]
    phases = ["command", "ray", "data", "placement", "engines", "models", "weights"]
    assert [line.partition(":")[0] for line in out[:7]] == phases
    assert all(re.fullmatch(r".*  +\d+\.\d s", line) and line in log for line in out[:8])
    assert out[7].startswith("evaluation: ") and re.fullmatch(r"eval at step 0 · score 0\.\d{3}", out[8])
    assert "a library in C++ says something\n" in log and "a library in Python says something\n" in log
    run, steps = f"{first.folder}/logs/skyrl/run", f"{first.folder}/{{}}/global_step_2"
    assert re.fullmatch(r"score: \d\.\d{3} before · \d\.\d{3} after", out[-7])
    assert out[-6:-1] == [
        f"metrics: {run}/metrics.jsonl",
        f"curves: {run}/curves.png",
        f"report: {run}/report.html",
        f"checkpoint: {steps.format('ckpts')}",
        f"exported model: {steps.format('exports')}/policy",
    ]


def test_the_numbers_of_each_step(first):
    before, one, two = first.lines
    parts = [seconds for name, seconds in one.items() if name.startswith("timing/start/")]
    assert sum(parts) == pytest.approx(one["timing/to_first_step"]) and one["timing/start/engines"] > 0
    assert one["timing/start/step"] >= one["timing/step"] and "timing/to_first_step" not in two
    assert before["step"] == 0 and before["eval/all/avg_score"] == before["eval/sums/avg_score"]
    for line in (one, two):
        assert line[GAP] <= AGREE
        assert {
            "reward/avg_raw_reward",
            "reward/avg_pass_at_4",
            "policy/final_loss",
            "policy/policy_kl",
            "policy/policy_lr",
            "policy/grad_norm",
            "loss/avg_raw_advantages_abs",
            "generate/avg_num_tokens",
            "timing/step",
            "timing/generate",
            "timing/policy_train",
            "timing/sync_weights",
            "trainer/tokens_per_second_per_gpu",
            "trainer/weight_sync_gb_per_second",
            "memory/generate_trainer_gb",
        } <= line.keys()
    assert abs(one["policy/policy_kl"]) < 1e-6 < two["policy/policy_kl"], "the reference stays where the policy was"
    assert "eval/sums/pass_at_1" in two


def test_trainer_and_engine_agree_over_the_engines_experts(first):
    for line in first.lines[1:]:
        assert line[GAP] <= AGREE
        assert 0.5 < line["policy/moe_routing_replayed"] < 1.0, "of all tokens but the last of each sequence"
        assert 0.0 <= line["policy/moe_routing_mismatch"] < 0.05
        assert line["generate/route_bytes_per_sample"] > 0


def test_what_is_left_behind(first):
    folder, log = first.folder, first.folder / "logs/skyrl/run"
    assert {"config.yaml", "metrics.jsonl", "report.html", "curves.png", "console.log"} <= set(os.listdir(log))
    assert (folder / "ckpts/latest_ckpt_global_step.txt").read_text().strip() == "2"
    exported = os.listdir(folder / "exports/global_step_2/policy")
    assert {"config.json", "tokenizer.json"} <= set(exported) and any(f.endswith(".safetensors") for f in exported)
    assert (folder / "exports/dumped_evals/global_step_2/sums.jsonl").is_file()


def test_secrets_are_in_nothing_that_is_left(first, hub, temporary, secrets):
    """Whatever their names: not in what the run wrote, in the logs of its Ray, in caches, or in shared memory."""
    folders = [first.folder, temporary, Path(hub.variables["HF_HOME"]), Path("/dev/shm")]
    assert list(temporary.rglob("runtime_env_agent.log")) and (first.folder / "logs/skyrl/run/console.log").exists()
    began = float((temporary / "session_began").read_text())
    assert not planted.found_in_files(secrets, folders, began)
    assert not [value for value in secrets.values() if value in first.out + first.err]


def test_nothing_but_logs_of_ray_is_left_in_the_temporary_folder(first, temporary):
    left = [path.name for path in temporary.iterdir() if path.name != "ray" and not path.name.startswith("session_")]
    assert not left


def test_others_cannot_read_samples_or_tokens(first):
    """Of folders and files that are there for all, none has any."""
    log = first.folder / "logs/skyrl/run"
    for folder in (log, first.folder / "exports/dumped_evals/global_step_2"):
        assert not folder.stat().st_mode & 0o007, folder
    weights = first.folder / "exports/global_step_2/policy/config.json"
    assert weights.stat().st_mode & 0o777 == 0o666 & ~umask(), "as the user would have it"


def test_hub_names_become_commits(first, hub):
    commit = hub.commits[f"{MODEL}@main"]
    assert f"hub: {MODEL}@main is commit {commit}" in first.out
    config = yaml.safe_load((first.folder / "logs/skyrl/run/config.yaml").read_text())
    manifest = json.loads((first.folder / "ckpts/global_step_2/MANIFEST.json").read_text())
    assert config["trainer"]["hub_commits"] == manifest["hub_commits"] == hub.commits
    card = (first.folder / "exports/global_step_2/policy/README.md").read_text()
    assert yaml.safe_load(card.split("---")[1]) == {"base_model": MODEL, "datasets": [DATA]} and commit in card
    assert not hub.downloads("pytorch_model.bin")
    weights = next(path.name for path in (first.folder / "model").glob("*.safetensors"))
    assert len(hub.downloads(weights)) == 1, "ranks and an engine share it"


def test_the_same_command_continues(first, again):
    """It makes up for the evaluation and the line that the first one did not come to after its checkpoint."""
    two = first.lines[2]
    assert f"resumed from {again.folder}/ckpts/global_step_2 (step 2 of 3)" in again.out
    assert [line["step"] for line in again.lines] == [0, 1, 2, 3]
    assert again.lines[3][GAP] <= AGREE, "the engine got the weights of the checkpoint"
    evaluated = [name for name in two if name.startswith("eval/") and "time" not in name]
    lasting = ("policy/", "reward/", "loss/", "generate/avg_", "trainer/epoch")
    kept = [name for name in two if name.startswith(lasting) and "time" not in name]
    assert "eval/sums/avg_score" in evaluated and len(kept) > 20
    assert {name: again.lines[2][name] for name in kept + evaluated} == {name: two[name] for name in kept + evaluated}
    assert again.lines[2]["timing/step"] > again.lines[2]["timing/generate"] == two["timing/generate"]


def test_a_continued_run_stays_with_the_commits_of_its_checkpoint(again, hub):
    commit = hub.commits[f"{MODEL}@main"]
    assert f"hub: {MODEL}@main is commit {commit}, as in the checkpoint" in again.out
    assert [line["trainer/global_step"] for line in again.lines if "trainer/global_step" in line][-1:] == [3]
    manifest = json.loads((again.folder / "ckpts/global_step_3/MANIFEST.json").read_text())
    assert manifest["hub_commits"] == hub.commits
    assert not [path for _, path, _ in hub.requests[hub.asked :] if "/resolve/" in path], "nothing is fetched anew"


def test_the_printed_checkpoint_is_converted_as_it_is(first, tmp_path):
    """Config and tokenizer are in it; the result is what the run exported."""
    from bridges import __main__ as bridges
    from skyrl_megatron.cli import convert

    printed = next(line for line in first.told if line.startswith("checkpoint: ")).partition(": ")[2]
    exported = first.folder / "exports/global_step_2/policy"
    assert convert([printed, str(tmp_path / "step")]) == 0
    assert convert([f"{printed}/policy", str(tmp_path / "policy")]) == 0
    for made in ("step", "policy"):
        assert bridges.main(["verify", str(tmp_path / made), str(exported)]) == 0
        assert (tmp_path / made / "tokenizer.json").read_bytes() == (exported / "tokenizer.json").read_bytes()


def test_a_finished_run_makes_what_is_asked_of_it_later_without_engines(tmp_path, hub, first):
    folder = tmp_path / "run"
    shutil.copytree(first.folder, folder)
    keys = KEYS | {"trainer__eval_interval": 2, "trainer__hf_save_interval": 2}
    done = runs.finish(runs.start(folder, variables=hub.variables, **keys), folder).check()
    assert "nothing left to do: the checkpoint of step 2 of 2 exists" in done.out and "ray: " not in done.out
    shutil.rmtree(folder / "exports")
    done = runs.finish(runs.start(folder, variables=hub.variables, **keys), folder).check()
    assert "left to do: export policy" in done.out and "engines: " not in done.out and "step 3" not in done.out
    ended = "ended after step 2 of 2: trainer.max_training_steps=2"
    assert ended in done.out and ended in first.out
    weights = [next((each / "exports/global_step_2/policy").glob("*.safetensors")) for each in (folder, first.folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [line["step"] for line in done.lines] == [0, 1, 2]


# ------------------------------------------------------------------ how runs end
IN_THE_CLUSTER = """
def start(self):
    register("digits", "digits:Digits")
    return BasePPOExp.start(self)
Exp.start = start
"""


@pytest.mark.full_matrix
def test_lines_of_a_run_in_a_cluster_appear_once_and_at_once(folder):
    """A cluster is joined; Ctrl-C here ends the run there, with everything saved; an error is one message here."""
    with runs.cluster(folder) as joining:
        keys = {"trainer__epochs": 20, "trainer__max_training_steps": 200}
        process = runs.start(folder, IN_THE_CLUSTER, variables=joining, **keys)
        try:
            lines = list(until_line(process, "step 3/200"))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        assert (process.returncode, err) == (130, ""), err[-4000:]
        lines += out.splitlines()
        saved = int((folder / "ckpts/latest_ckpt_global_step.txt").read_text())
        assert saved >= 3
        lines = [line for line in lines if not line.startswith("… ")]
        assert [line.partition(":")[0] for line in lines[:3]] == ["command", "ray", "data"]
        steps = [line.split()[1] for line in lines if line.startswith("step ")]
        assert steps == [f"{number}/200" for number in range(1, saved + 1)]
        assert f"stopped after step {saved}; the same command continues from there" in lines
        assert lines[-1] == f"checkpoint: {folder}/ckpts/global_step_{saved}"
        failed = runs.finish(runs.start(folder, variables=joining, **keys), folder)
        assert failed.returncode == 1
        assert failed.err.startswith("no environment 'digits'") and "Traceback" not in failed.err


@pytest.mark.full_matrix
def test_turns_dynamic_sampling_and_kl_in_the_reward(folder):
    """REINFORCE++ over two turns; one reference rank."""
    done = runs.run(
        folder,
        trainer__algorithm__advantage_estimator="reinforce++",
        trainer__algorithm__use_kl_in_reward="true",
        trainer__algorithm__dynamic_sampling__type="filter",
        trainer__placement__ref_num_gpus_per_node=1,
        trainer__ref__megatron_config__expert_model_parallel_size=1,
        generator__max_turns=2,
        generator__max_input_length=64,
        trainer__policy_mini_batch_size=2,
    ).check()
    for line in done.lines:
        assert line["generate/avg_turns"] == 2.0 and line["loss/avg_kl"] >= 0 and line[GAP] <= AGREE
        assert line["generate/sampled_batches"] >= 1


@pytest.mark.full_matrix
def test_roles_observations_and_length_penalties(folder):
    """The baselines of roles are in the checkpoint; observations of the second turn are a term of the loss."""
    done = runs.run(
        folder,
        trainer__algorithm__advantage_estimator="rae",
        trainer__algorithm__observation_loss_coef=0.1,
        trainer__algorithm__length_penalty="{type: overlong, max_length: 8, buffer: 8, coef: 0.5}",
        trainer__algorithm__off_policy_correction__sequence_error_high=2.0,
        trainer__ckpt_interval=2,
        generator__max_turns=2,
        generator__max_input_length=64,
    ).check()
    for line in done.lines:
        assert line["policy/observation_loss"] > 0 and 0 < line["loss/avg_length_penalty"] <= 0.5
        assert line["policy/loss_metrics/sequence_error_masked_ratio"] == 0.0
        total = line["policy/policy_loss"] + 0.1 * line["policy/observation_loss"]
        assert line["policy/final_loss"] == pytest.approx(total, rel=1e-5)
    state = json.loads((folder / "ckpts/global_step_2/trainer_state.json").read_text())
    assert list(state["role_baselines"]) == [""]


@pytest.mark.full_matrix
@pytest.mark.parametrize("signal", ["reward", "loss"])
def test_the_policy_teaches_itself_with_a_hint(folder, signal):
    """As tokens' rewards, and as a term of the loss."""
    rows = [json.loads(line) | {"hint": "say 7 now"} for line in (folder / "prompts.jsonl").read_text().splitlines()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ways = {
        "reward": {"trainer__algorithm__advantage_estimator": "distillation"},
        "loss": {"trainer__algorithm__distillation__loss_coef": 0.5, "trainer__algorithm__distillation__top_k": 8},
    }
    done = runs.run(folder, trainer__algorithm__distillation__demonstration="hint", **ways[signal]).check()
    for line in done.lines:
        assert line["timing/teacher"] > 0
        if signal == "reward":
            assert line["distillation/reverse_kl"] != 0 and line["loss/avg_raw_advantages_abs"] > 0
        else:
            assert line["policy/distillation_loss"] > 0


SKIPS_A_SYNC = """
def sync_weights(self):
    if self.global_step != 1:
        RayPPOTrainer.sync_weights(self)
Trainer.sync_weights = sync_weights
"""


@pytest.mark.full_matrix
def test_a_skipped_sync_shows(folder):
    """The log-probs of step 2 are those of a policy that the engine does not have."""
    lines = runs.run(folder, SKIPS_A_SYNC).check().lines
    assert lines[0][GAP] <= AGREE < lines[1][GAP]


ASKS_THE_ENDPOINT = """
import json, urllib.request
from skyrl_megatron.config.resolve import run_folder
def train_critic_and_policy(self, batch):
    token = (run_folder(self.cfg) / "http_token").read_text().strip()
    body = json.dumps({"model": "policy", "prompt": "12+34=", "max_tokens": 3, "temperature": 0}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    url = self.inference_engine_client.endpoint_url + "/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        self.metrics["endpoint/tokens"] = json.load(answer)["usage"]["completion_tokens"]
    RayPPOTrainer.train_critic_and_policy(self, batch)
Trainer.train_critic_and_policy = train_critic_and_policy
"""


@pytest.mark.full_matrix
def test_the_endpoint_answers_while_the_policy_is_trained(folder):
    engine = "generator__inference_engine__"
    keys = {"enable_http_endpoint": "true", "http_endpoint_port": 0, "served_model_name": "policy"}
    keys = {engine + key: value for key, value in keys.items()}
    lines = runs.run(folder, ASKS_THE_ENDPOINT, trainer__max_training_steps=1, **keys).check().lines
    assert 1 <= lines[0]["endpoint/tokens"] <= 3


SLOW = """
import time
from skyrl_megatron.trainer.callbacks import TrainerCallback
def train_steps(self):
    print("training", flush=True)
    RayPPOTrainer.train_steps(self)
Trainer.train_steps = train_steps
"""


@pytest.mark.full_matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_and_loses_nothing(folder, number):
    """SIGTERM saves the last whole step; after kill -9 the last checkpoint counts. Both are gone within a minute."""
    before = descendants()
    process = runs.start(folder, SLOW, trainer__epochs=20, trainer__max_training_steps=200, trainer__ckpt_interval=2)
    children = []
    try:
        list(until_line(process, "step 3/200"))
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert not left_behind(children)
    assert descendants() <= before
    saved = int((folder / "ckpts/latest_ckpt_global_step.txt").read_text())
    if number == signal.SIGTERM:
        assert process.returncode == 143, err[-4000:]
        assert saved >= 3 and f"stopped after step {saved}" in out
    else:
        assert saved >= 2
    again = runs.run(folder, trainer__max_training_steps=saved + 1).check()
    assert f"(step {saved} of {saved + 1})" in again.out
    steps = [line["step"] for line in again.lines]
    assert steps == list(range(1, saved + 2))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainer__train_batchsize": 3}, "trainer.train_batchsize=3: unknown key"),
        ({"data__train_data": "['/nowhere/prompts.jsonl']"}, "/nowhere/prompts.jsonl"),
        ({"environment__env_class": "nothing"}, "no environment 'nothing'"),
    ],
)
def test_mistakes_are_one_message(folder, capsys, overrides, message):
    """As the script of these runs makes them, before anything starts (``tests/first_hour`` types such a command)."""
    from skyrl_megatron.checks import load_config
    from skyrl_megatron.command import run_command
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment

    def work():
        run_experiment(load_config(SkyRLTrainConfig, runs.arguments(folder, **overrides))[0], BasePPOExp)
        return 0

    assert run_command(work) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told


NAN = """
from skyrl_megatron.envs import BaseTextEnv
class Broken(BaseTextEnv):
    def step(self, action):
        return {"observations": [], "reward": float("nan"), "done": True, "metadata": {}}
register("broken", Broken)
"""


FEWER_EXPERTS = """
from skyrl_megatron.workers import engines
settings = engines.engine_settings
fewer = {"model_changes": {"num_experts_per_tok": 1}}
engines.engine_settings = lambda cfg, **changes: settings(cfg, **changes, **fewer)
"""


@pytest.mark.full_matrix
def test_mistakes_that_show_late_are_one_message_too(folder):
    """A reward that is no number; engines that compute with fewer experts than the trainer, which no key asks for."""
    before = descendants()
    failed = runs.run(folder, NAN, environment__env_class="broken")
    assert failed.returncode == 1, failed.err[-4000:]
    assert "'broken', trajectory" in failed.err and "the reward is nan" in failed.err
    assert "Traceback" not in failed.err
    failed = runs.run(folder, FEWER_EXPERTS)
    assert failed.returncode == 1, failed.err[-4000:]
    assert "version 0 is not published" in failed.err and "interpret the weights differently" in failed.err
    assert "Traceback" not in failed.err
    assert descendants() <= before
