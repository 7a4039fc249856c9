"""No setting is without effect in silence: setting it changes what the run comes to, is refused, or is told.

The table is ``tests/config/settings/table.py``; a new field without a row fails here.
"""

import contextlib
import os
import shutil
import warnings

import pytest

from skyrl_megatron.checks import PlannedRun, run_checks
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.fields import leaves
from skyrl_megatron.config.rules.ineffective import ineffective_settings
from skyrl_megatron.config.validate import find_problems, require_available
from skyrl_megatron.errors import ConfigError
from tests.config.settings import base
from tests.config.settings.table import NO_EFFECT, REFUSED, REFUSED_BY_RANKS, ROWS
from tests.config.test_ineffective import IDLE_BY_DEFAULT

pytestmark = pytest.mark.slow

KEYS = [key for key, _, _ in leaves(SkyRLTrainConfig)]
OF_RANKS = [key for key, row in ROWS.items() if isinstance(row.shows, str) and row.shows != "warns"]
DESCRIBED = [key for key, row in ROWS.items() if callable(row.shows)]
FALSE_ANYWAY = {
    f"trainer.{role}.megatron_config.dist_ckpt_optim_fully_reshardable" for role in ("ref", "critic", "teacher")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model and data, and the environment that tells where they are."""
    folder = tmp_path_factory.mktemp("settings")
    base.prepare(folder)
    before = dict(os.environ)
    os.environ[base.FOLDER] = str(folder)
    with contextlib.chdir(folder):
        yield folder
    os.environ.clear()
    os.environ.update(before)


def test_every_setting_has_one_place():
    """A row, a refusal, or the list of what has no effect."""
    known = [*ROWS, *REFUSED, *REFUSED_BY_RANKS]
    assert len(known) == len(set(known)) and set(known) <= set(KEYS), set(known) - set(KEYS)
    sections = tuple(each for each in NO_EFFECT if each.endswith("."))
    left = set(KEYS) - set(known)
    unknown = {key for key in left if key not in NO_EFFECT and not key.startswith(sections)}
    assert not unknown, f"no row says what these do: {sorted(unknown)}"
    silent = left - set(IDLE_BY_DEFAULT) - FALSE_ANYWAY
    assert not silent, f"nobody is told that these have no effect: {sorted(silent)}"


@pytest.mark.parametrize("key", DESCRIBED)
def test_a_setting_changes_the_run(folder, key):
    row = ROWS[key]

    def described(keys):
        shutil.rmtree(folder / "out", ignore_errors=True)
        return row.shows(base.resolved(row.given | keys))

    plain = described({})
    assert described({}) == plain, "the description itself varies"
    assert described({key: ROWS[key].value}) != plain


@pytest.fixture(scope="module")
def of_ranks(folder, ranks):
    """What a rank says of itself: without a setting and with it, for each of :data:`OF_RANKS`; and what it says to
    settings that it refuses."""
    from tests.config.settings.ranks import describe_body

    asked = {}
    for key in OF_RANKS:
        row, role = ROWS[key], "ref" if key.startswith("trainer.ref.") else "policy"
        for keys in (row.given, row.given | {key: ROWS[key].value}):
            asked[repr((role, keys, row.shows))] = (role, keys, row.shows)
    for key, value in REFUSED_BY_RANKS.items():
        asked[key] = ("ref" if key.startswith("trainer.ref.") else "policy", {key: value}, "path")
    (described,) = ranks(1, describe_body, str(folder), list(asked.values()))
    return dict(zip(asked, described, strict=True))


@pytest.mark.parametrize("key", OF_RANKS)
def test_a_setting_changes_a_rank(folder, of_ranks, key):
    row, role = ROWS[key], "ref" if key.startswith("trainer.ref.") else "policy"
    without = of_ranks[repr((role, row.given, row.shows))]
    with_it = of_ranks[repr((role, row.given | {key: ROWS[key].value}, row.shows))]
    for described in (without, with_it):
        assert "Traceback" not in str(described), described
    assert without != with_it


@pytest.mark.parametrize("key", REFUSED_BY_RANKS)
def test_a_setting_is_refused_by_a_rank(of_ranks, key):
    assert f"ConfigError: 1 problem in the configuration:\n  - {key}=True: " in of_ranks[key]


@pytest.mark.parametrize("key", ROWS)
def test_what_changes_the_run_is_not_called_idle(folder, key):
    cfg = base.resolved(ROWS[key].given | {key: ROWS[key].value})
    assert key not in {named for named, _, _ in ineffective_settings(cfg, base.GPUS)}


TEMPLATES = "generator.chat_template_kwargs"
"""Only the template itself knows what it reads."""
NEEDS_OTHERS = [key for key, row in ROWS.items() if row.given and callable(row.shows) and key != TEMPLATES]


@pytest.mark.parametrize("key", NEEDS_OTHERS)
def test_a_setting_alone_is_not_silent(folder, key, tmp_path, monkeypatch):
    """Without the settings that its row needs it has its effect all the same, or is told, or refused."""
    monkeypatch.chdir(tmp_path)
    cfg = base.resolved({key: ROWS[key].value})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        problems = run_checks(PlannedRun(cfg, base.GPUS)).problems
    name = key.rpartition(".")[2]
    if any(key in str(each.message) for each in caught) or any(name in str(problem) for problem in problems):
        return
    assert ROWS[key].shows(cfg) != ROWS[key].shows(base.resolved({}))


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_is_refused(folder, key):
    head, _, name = key.rpartition(".")
    given = {head: {name: REFUSED[key]}} if "mixed_precision" in key else {key: REFUSED[key]}
    cfg = base.resolved(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problems = run_checks(PlannedRun(cfg, base.GPUS)).problems
    assert [
        each for each in problems if (each.key in (key, head) and each.fix) or f"{name}={REFUSED[key]} " in each.fix
    ]


def test_the_strategy_of_other_systems_is_told(folder):
    with pytest.warns(UserWarning, match="trainer.strategy=fsdp2"):
        find_problems(SkyRLTrainConfig.from_cli_overrides(base.base() | {"trainer.strategy": "fsdp2"}), base.GPUS)


def test_a_run_refuses_families_that_no_engine_runs(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "dots1"}')
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match="no engine runs dots1: vLLM removed"):
        require_available(cfg)
