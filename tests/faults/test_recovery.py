"""Ranks that are lost in real runs, and replaced: the numbers are those of a run that lost none, bit for bit."""

import hashlib

import pytest

from tests.faults.lives import NO_FAULT, Lives
from tests.faults.ways import TWO_ROLES

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]

STEPS = 7
KEYS = {
    "trainer__max_training_steps": STEPS,
    "trainer__hf_save_interval": STEPS,
    "trainer__policy_mini_batch_size": 2,
    "trainer__healing__enabled": "true",
    "trainer__healing__max_times": 20,
}
ROLES = TWO_ROLES | {"trainer__max_training_steps": 3, "trainer__hf_save_interval": 3}
LOST = [
    ("policy 1", "SIGKILL", "policy_train", 0),
    ("policy 0", "SIGKILL", "between updates", 1),
    ("policy 1", "SIGSEGV", "fwd_logprobs_values_reward", 2),
    ("policy 0", "SIGKILL", "sync_weights", 3),
    ("policy 1", "SIGKILL", "save_checkpoints", 4),
    ("policy 1", "SIGKILL", "generate", 5),
    ("policy 0", "SIGKILL", "policy_train", 6),
    ("policy 1", "SIGKILL", "policy_train", 6),
]
"""(who, what, when, whole steps before it): one after the other in one run; the last two at once."""


def armed(faults, delay_s=0.02):
    """What ``Lives.live`` takes for several faults."""
    return ")\ninjection.arm(".join(
        f"{who!r}, {what!r}, {when!r}, {step}, delay_s={delay_s}" for who, what, when, step in faults
    )


def exported(lives, step):
    """SHA-256 of the weights that a run exported."""
    files = sorted(lives.folder.glob(f"exports/global_step_{step}/policy/*.safetensors"))
    assert files
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def numbers(lives):
    """What of a run's metrics does not depend on time, by step."""
    lasting = ("policy/", "critic/", "reward/", "loss/", "generate/avg_num")
    timed = ("_per_", "memory", "mfu", "score_")
    return [
        {
            name: value
            for name, value in line.items()
            if name == "step" or (name.startswith(lasting) and not any(part in name for part in timed))
        }
        for line in lives.lines
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    lives = Lives(tmp_path_factory.mktemp("undisturbed"))
    life = lives.live(NO_FAULT, **KEYS)
    assert life.run.returncode == 0, f"{life.run.out[-2000:]}\n{life.run.err[-4000:]}"
    assert all(line["trainer/healings"] == 0 and line["trainer/state_copies_gb"] > 0 for line in lives.lines)
    return lives


@pytest.fixture(scope="module")
def healed(tmp_path_factory):
    lives = Lives(tmp_path_factory.mktemp("healed"))
    return lives, lives.live(armed(LOST), **KEYS)


def test_lost_ranks_are_replaced_and_the_numbers_are_those_of_no_fault(undisturbed, healed):
    lives, life = healed
    assert life.run.returncode == 0, f"{life.run.out[-4000:]}\n{life.run.err[-4000:]}"
    assert len(lives.faults) == len(LOST), lives.faults
    assert numbers(lives) == numbers(undisturbed) and len(numbers(lives)[0]) > 15
    assert exported(lives, STEPS) == exported(undisturbed, STEPS)


def test_each_is_told_and_counted(healed):
    lives, life = healed
    lines = [line for line in life.run.out.splitlines() if line.startswith("recovered: ")]
    assert len(lines) == len(LOST) - 1, lines
    assert sum("left no copy" in line for line in lines) == 1
    assert sum(line["trainer/healings"] for line in lives.lines) == len(lines)
    assert [line["step"] for line in lives.lines] == list(range(1, STEPS + 1))
    assert "Traceback" not in life.message


def test_without_copies_all_go_back(undisturbed, tmp_path):
    """To where the run began, as nothing was saved, and then to its checkpoint. More than it allows ends it with the
    message that it always had, and the same command continues."""
    keys = KEYS | {"trainer__ckpt_interval": 2, "trainer__healing__copies": "none", "trainer__healing__max_times": 2}
    lives = Lives(tmp_path)
    faults = [("policy 0", "SIGKILL", "policy_train", step) for step in (1, 3, 5)]
    life = lives.live(armed(faults), **keys)
    assert len(lives.faults) == 3, f"{life.run.out[-4000:]}\n{life.run.err[-4000:]}"
    assert life.run.returncode == 1 and life.saved == 4
    assert "policy rank 0" in life.message and "the process died" in life.message
    assert "Traceback" not in life.message and len(life.message.splitlines()) <= 2
    assert life.run.out.count("\nrecovered: ") == 2 and "not recovered: 2 times within 10 steps" in life.run.out
    assert lives.live(NO_FAULT, **keys).run.returncode == 0
    assert numbers(lives) == numbers(undisturbed)
    assert exported(lives, STEPS) == exported(undisturbed, STEPS)


def test_a_stopped_rank_is_replaced(undisturbed, tmp_path):
    """After its deadline; the one that waits for it stays."""
    lives = Lives(tmp_path)
    keys = KEYS | {"trainer__phase_timeout_s": 90, "trainer__max_training_steps": 3}
    life = lives.live(armed([("policy 1", "SIGSTOP", "policy_train", 1)]), **keys)
    assert life.run.returncode == 0, f"{life.run.out[-4000:]}\n{life.run.err[-4000:]}"
    assert "policy rank 1" in life.run.out.partition("recovered: ")[2] and "policy rank 0" in lives.stacks
    assert numbers(lives) == numbers(undisturbed)[:3]


TWICE = [
    ("policy 1", "SIGKILL", "policy_train", 0),
    ("policy 1", "SIGKILL", "heal", 0),
    ("policy 0", "SIGKILL", "policy_train", 2),
    ("policy 1", "SIGKILL", "heal", 2),
    ("engine core", "SIGKILL", "heal", 2),
]
"""One that is being started for a lost one; then the one that lived on and held all copies, and an engine."""


def test_what_is_lost_while_others_are_replaced_is_replaced_too(undisturbed, tmp_path):
    lives = Lives(tmp_path)
    life = lives.live(armed(TWICE), **KEYS)
    assert life.run.returncode == 0, f"{life.run.out[-4000:]}\n{life.run.err[-4000:]}"
    assert len(lives.faults) == len(TWICE), lives.faults
    lines = [line for line in life.run.out.splitlines() if line.startswith("recovered: ")]
    assert ["left no copy" in line for line in lines] == [False, True], lines
    assert numbers(lives) == numbers(undisturbed) and exported(lives, STEPS) == exported(undisturbed, STEPS)


ROLES_LOST = [
    ("ref 0", "SIGKILL", "fwd_logprobs_values_reward", 0),
    ("critic 1", "SIGKILL", "critic_train", 1),
    ("policy 0", "SIGKILL", "policy_train", 2),
]


def test_ranks_of_other_roles_are_replaced(tmp_path_factory):
    """The reference reads its folder again; a critic whose updates were made goes back with the policy."""
    runs = [Lives(tmp_path_factory.mktemp(name)) for name in ("lost", "whole")]
    for lives, fault in zip(runs, (armed(ROLES_LOST), NO_FAULT), strict=True):
        life = lives.live(fault, **KEYS | ROLES | {"trainer__critic__model__path": lives.folder / "model"})
        assert life.run.returncode == 0, f"{life.run.out[-4000:]}\n{life.run.err[-4000:]}"
    lost, whole = runs
    assert len(lost.faults) == len(ROLES_LOST) == sum(line["trainer/healings"] for line in lost.lines)
    assert numbers(lost) == numbers(whole) and any(name.startswith("critic/") for name in numbers(whole)[0])
    assert exported(lost, 3) == exported(whole, 3)
