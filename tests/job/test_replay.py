"""A whole run repeated from what another recorded: the same numbers and weights, and nothing is sampled."""

import pytest

from tests.job import runs
from tests.job.test_fully_async import AHEAD, NOTES, notes, weights

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]

SLOW = '''
import time
from skyrl_megatron.envs import BaseTextEnv


class Digits(BaseTextEnv):
    """Answers late, and some prompts later than others, so that responses lag."""

    def init(self, prompt):
        self.kind = int(prompt[-1]["content"].partition("+")[0])
        return super().init(prompt)

    def step(self, action):
        time.sleep(2.0 if self.kind % 3 == 0 else 0.2)
        reward = sum(character.isdigit() for character in action) / 6
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
'''
REFUSES = '''
from skyrl_megatron.envs import BaseTextEnv


class Digits(BaseTextEnv):
    """Must not be asked."""

    def init(self, prompt):
        raise RuntimeError("a replay samples nothing")
'''
SAME = ("policy/", "reward/", "loss/", "generate/", "async/staleness")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return runs.prepare(tmp_path)


def test_a_replay_trains_the_same_bit_for_bit(folder, tmp_path):
    """Two optimizer steps on each batch, with corrections; groups without variety are replaced by others."""
    (folder / "digits.py").write_text(SLOW)
    keys = AHEAD | {
        "trainer__fully_async__keep_rollouts": "true",
        "trainer__algorithm__dynamic_sampling__type": "replace",
        "trainer__ckpt_interval": 1,
        "trainer__hf_save_interval": 5,
    }
    first = runs.run(folder, NOTES, **keys).check()
    taken = notes(folder)
    assert max(line["async/staleness_max"] for line in first.lines) == 1.0, "it ran ahead"

    other = tmp_path / "other"
    other.mkdir()
    runs.prepare(other)
    (other / "digits.py").write_text(REFUSES)
    (folder / "notes.jsonl").unlink()
    again = keys | {
        "trainer__fully_async__replay_from": folder / "ckpts/rollouts",
        "data__train_data": f"['{folder}/prompts.jsonl']",
        "trainer__policy__model__path": folder / "model",
    }
    second = runs.run(other, NOTES, **again).check()
    assert "replay: steps 1 to 5 of" in second.out and "will differ" not in second.out
    assert notes(folder) == taken
    for one, two in zip(first.lines, second.lines, strict=True):
        kept = [name for name in one if name.startswith(SAME) and "_per_" not in name and "memory" not in name]
        assert len(kept) > 20 and {name: two.get(name) for name in kept} == {name: one[name] for name in kept}
    assert weights(folder, 5) == weights(other, 5) != {}
