"""Runs with more roles than the policy: PPO with a critic, a reference that follows the policy."""

import json

import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP

pytestmark = pytest.mark.vllm


@pytest.fixture
def folder(tmp_path):
    return runs.prepare(tmp_path)


def critic(folder, **more):
    """PPO with a critic on one rank, beside a policy whose experts lie on two; both λ differ."""
    keys = {
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__algorithm__lambd": 0.9,
        "trainer__algorithm__gae__critic_lambd": 1.0,
        "trainer__critic__model__path": folder / "model",
        "trainer__critic_mini_batch_size": 2,
        "trainer__placement__critic_num_gpus_per_node": 1,
        "trainer__critic__megatron_config__expert_model_parallel_size": 1,
        "trainer__critic__optimizer_config__lr": 1e-3,
    }
    return keys | more


REFERENCE = {
    "trainer__algorithm__use_kl_loss": "true",
    "trainer__update_ref_every_epoch": "true",
    "trainer__placement__ref_num_gpus_per_node": 1,
    "trainer__ref__megatron_config__expert_model_parallel_size": 1,
}

TURNS = ("generate", "fwd_logprobs_values_reward", "critic_train", "policy_train")
TAKE_TURNS = """
def train_steps(self):
    self.cfg.trainer.placement.colocate_all = True  # from here on they take turns, as if they shared GPUs
    RayPPOTrainer.train_steps(self)
Trainer.train_steps = train_steps
def begin_training(self):
    for role in self.roles.values():
        role.offload()
    RayPPOTrainer.begin_training(self)
Trainer.begin_training = begin_training
"""


def test_ppo_with_a_critic(folder):
    """A step in which the critic learns alone, and one of both, which is evaluated; the two take turns, and are saved
    and exported. The critic's checkpoint is converted."""
    from bridges.convert import compare
    from bridges.source import open_hf
    from skyrl_megatron.cli import convert

    keys = {"trainer__critic_warmup_steps": 1, "trainer__hf_save_interval": 2, "trainer__eval_interval": 2}
    done = runs.run(folder, TAKE_TURNS, **critic(folder, **keys)).check()
    one, two = done.lines
    for line in (one, two):
        assert line[GAP] <= AGREE and line["critic/critic_loss"] > 0 and line["critic/grad_norm"] > 0
        assert {
            "critic/values_mean",
            "critic/values_clipfrac",
            "critic/returns_mean",
            "critic/explained_variance",
            "critic/critic_lr",
            "timing/critic_train",
        } <= line.keys()
    assert "policy/grad_norm" not in one and two["policy/grad_norm"] > 0
    assert "eval/sums/avg_score" not in one and 0 <= two["eval/sums/avg_score"] <= 1
    held = {role: [two[f"memory/{phase}_{role}_gb"] for phase in TURNS] for role in ("policy", "critic")}
    assert [size > 0 for size in held["critic"]] == [False, True, True, False], "it leaves before the policy trains"
    assert held["policy"][1:3] == [0, 0] and held["policy"][3] > 0, "it leaves before the critic scores and trains"
    assert {path.name for path in (folder / "ckpts/global_step_2").iterdir()} >= {"policy", "critic"}
    converted, exported = folder / "converted", folder / "exports/global_step_2/critic"
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["Qwen3MoeForTokenClassification"]
    assert convert([str(folder / "ckpts/global_step_2/critic"), str(converted)]) == 0
    assert json.loads((converted / "config.json").read_text()) == json.loads((exported / "config.json").read_text())
    assert not compare(converted, exported).differences, "the value head included"
    assert "score.weight" in open_hf(converted).shapes()


HASHES = """
import json, hashlib
from pathlib import Path
sampled = hashlib.sha256()
def convert_to_training_input(self, generator_output, uids):
    batch = RayPPOTrainer.convert_to_training_input(self, generator_output, uids)
    if self.global_step >= 3:
        sampled.update(batch.tokens.numpy().tobytes() + batch.lengths.tobytes())
    return batch
def finish(self):
    state = {name: role.state_hashes() for name, role in self.roles.items()}
    Path(self.cfg.trainer.export_path).mkdir(exist_ok=True)
    (Path(self.cfg.trainer.export_path) / "hashes.json").write_text(json.dumps([state, sampled.hexdigest()]))
    RayPPOTrainer.finish(self)
Trainer.convert_to_training_input = convert_to_training_input
Trainer.finish = finish
"""


@pytest.mark.full_matrix
def test_a_resumed_run_of_all_roles_is_the_uninterrupted_one(tmp_path):
    """Policy, critic and a reference that became the policy after the first epoch: weights, moments, random states.
    An epoch is of two steps, the checkpoint after three. The uninterrupted run takes turns in memory, too: that
    changes nothing."""
    found = []
    for name, stops in {"whole": [4], "resumed": [3, 4]}.items():
        folder = tmp_path / name
        folder.mkdir()
        runs.prepare(folder)
        keys = critic(folder, **REFERENCE, trainer__train_batch_size=20, trainer__policy_mini_batch_size=20)
        keys |= {"generator__n_samples_per_prompt": 1, "trainer__critic_mini_batch_size": 20}
        for stop in stops:
            body = HASHES + (TAKE_TURNS if name == "whole" else "")
            done = runs.run(folder, body, **keys, trainer__max_training_steps=stop, trainer__ckpt_interval=3).check()
        found.append(json.loads((folder / "exports/hashes.json").read_text()))
        assert "timing/update_ref" in done.lines[1] and "timing/update_ref" not in done.lines[2]
        assert done.lines[2]["policy/policy_kl"] < 1e-6 < done.lines[3]["policy/policy_kl"]
        assert done.lines[1]["policy/policy_kl"] > 1e-6
    assert found[0] == found[1]


K = 8


def taught(folder, *teachers):
    """Metrics of a step in which row n is judged by teacher n modulo their number, with both signals, and what they
    are by transformers."""
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    text = [json.dumps(row | {"teacher": teachers[number % len(teachers)]}) for number, row in enumerate(rows)]
    (folder / "prompts.jsonl").write_text("\n".join(text) + "\n")
    done = runs.run(
        folder,
        trainer__algorithm__advantage_estimator="distillation",
        trainer__algorithm__distillation__loss_coef=0.5,
        trainer__algorithm__distillation__top_k=K,
        trainer__teacher__models=f"{{same: {folder}/model, other: {folder}/other}}",
        trainer__placement__teacher_num_gpus_per_node=1,
        trainer__teacher__megatron_config__expert_model_parallel_size=1,
        trainer__max_training_steps=1,
        trainer__dump_data_batch="true",
    ).check()
    return done.lines[-1], by_transformers(folder, teachers)


def dumped(folder):
    """The tensors of the first step, padded."""
    from skyrl_megatron_observe.dump import read_dump

    return read_dump(folder / "exports/dumped_data/global_step_1.safetensors")[0].padded()


def by_transformers(folder, teachers):
    """Means over the tokens of the dumped batch: log p_student − log p_teacher; KL(teacher ‖ student) over the
    teacher's K likeliest and the rest; the teacher's probability of that rest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    batch = dumped(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    models = {"same": folder / "model", "other": folder / "other"}
    models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in models.items()}
    found = []
    for row, sequence in enumerate(batch.sequences):
        tokens, sampled = sequence[batch.attention_mask[row]], int(batch.response_mask[row].sum())
        prompt = tokenizer.decode(tokens[:-sampled], skip_special_tokens=True)
        teacher = teachers[(int(prompt.partition("+")[0]) - 11) % len(teachers)]
        with torch.no_grad():
            every = [models[name](tokens[None]).logits[0, -sampled - 1 : -1].double() for name in ("same", teacher)]
        student, teacher = (each.log_softmax(-1) for each in every)
        own = (student - teacher).gather(1, tokens[-sampled:, None])
        best = teacher.topk(K, -1).indices
        p, q = (
            torch.cat([e.gather(1, best).exp(), 1 - e.gather(1, best).exp().sum(-1, keepdim=True)], 1)
            for e in (teacher, student)
        )
        kl = (p * (p / q).log()).sum(-1, keepdim=True)
        found.append(torch.cat([own, kl, p[:, -1:]], 1)[batch.loss_mask[row, -sampled:] > 0])
    return torch.cat(found).mean(0).tolist()


@pytest.mark.full_matrix
@pytest.mark.parametrize("teachers", [("same",), ("same", "other")], ids=" and ".join)
def test_teachers_judge_their_own_rows(folder, teachers):
    """Rows choose between the policy's own first weights and another model; both signals, on one rank each."""
    from skyrl_megatron.tiny_model import write_embedded_model

    write_embedded_model(folder / "other", 2)
    line, (reverse_kl, divergence, omitted) = taught(folder, *teachers)
    assert line["distillation/reverse_kl"] == pytest.approx(reverse_kl, rel=1e-4, abs=1e-5)
    assert line["policy/distillation_loss"] == pytest.approx(divergence, rel=1e-4, abs=1e-6)
    assert line["policy/teacher_omitted"] == pytest.approx(omitted, rel=1e-4)
    assert (min(abs(reverse_kl), divergence) > 1e-3) == ("other" in teachers), "the two models differ"
    assert line[GAP] <= AGREE


def scorer(folder, positions=None):
    """A folder for sequence classification, and its model."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    config.pad_token_id, config.max_position_embeddings = 0, positions or config.max_position_embeddings
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder / "scorer")
    return model


def rewarded(folder):
    """A run of one step, which the model of :func:`scorer` rewards."""
    return runs.run(
        folder,
        trainer__teacher__model__path=folder / "scorer",
        trainer__algorithm__distillation__reward_coef=2.0,
        trainer__placement__teacher_num_gpus_per_node=2,
        trainer__max_training_steps=1,
        trainer__dump_data_batch="true",
    )


@pytest.mark.full_matrix
@pytest.mark.parametrize("positions", [None, 17], ids=["whole", "short"])
def test_a_reward_model_scores_the_samples(folder, positions):
    """Its scores, by plain transformers, are added to the rewards. Longer samples than its context are masked."""
    import torch

    model = scorer(folder, positions)
    done = rewarded(folder).check()
    batch, scores = dumped(folder), []
    for row, sequence in enumerate(batch.sequences):
        tokens = sequence[batch.attention_mask[row]]
        if len(tokens) < model.config.max_position_embeddings and batch.loss_mask[row].any():
            with torch.no_grad():
                hidden = model.model(tokens[None]).last_hidden_state[0, -1]
                scores.append(model.score(hidden).item())
    line = done.lines[-1]
    trained = int((batch.loss_mask > 0).any(1).sum())
    assert line["reward/unscored_samples"] == trained - len(scores)
    assert (len(scores) < trained) == (positions is not None), batch.attention_mask.sum(1)
    assert line["reward/avg_model_score"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
    assert line[GAP] <= AGREE


@pytest.mark.full_matrix
def test_a_reward_model_that_scores_no_sample(folder):
    scorer(folder, 8)
    done = rewarded(folder)
    assert done.returncode == 1 and "has a finite score within the 8 positions of this reward model" in done.err
