"""No setting is ignored in silence: each field is read by the code that acts on it, or warns when it is set.

Reading a field to check or describe it does not count, so the configuration package itself is left out, but for the
files that turn fields into what a run does. A field counts as read where its name is taken from an object or named in
a string (``getattr``, a dotted key); short names that occur everywhere must be taken from their own section.
"""

import ast
import re
from pathlib import Path

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.fields import default_of, leaves, owner_of
from skyrl_megatron.config.rules.unavailable import NOT_AVAILABLE, require_available
from skyrl_megatron.config.validate import WITHOUT_EFFECT
from skyrl_megatron.errors import ConfigError

ROOT = Path(__file__).parents[2]
ACTING = {"derive.py", "resolve.py", "role_layout.py", "run_folder.py"}
"""Files of the configuration package that act on fields instead of checking them."""

DESCRIBING = {"check_report.py", "memory_budget.py"}
"""Files elsewhere that only tell what fields come to."""

REFUSED = {"FSDPConfig", "MixedPrecisionConfig"}
"""Classes whose fields are refused unless they have their defaults."""

SECTION = {
    "KLCtrlConfig.type": "kl_ctrl|control",
    "DynamicSamplingConfig.type": "dynamic_sampling|config",
    "ModelConfig.path": "model",
    "SkyRLLoraConfig.rank": "lora",
    "SkyRLLoraConfig.alpha": "lora",
    "SkyRLLoraConfig.dropout": "lora",
    "ChatTemplateConfig.source": "chat_template|template|config",
    "GSM8kLLMJudgeEnvConfig.model": "llm_as_a_judge|settings|config|env_config",
    "GSM8kLLMJudgeEnvConfig.base_url": "llm_as_a_judge|settings|config|env_config",
    "SearchEnvConfig.timeout": "search|settings|config|env_config",
    "SearchEnvConfig.topk": "search|settings|config|env_config",
    "MegatronTorchProfilerConfig.enable": "torch_profiler_config|settings|profiler",
    "MegatronTorchProfilerConfig.ranks": "torch_profiler_config|settings|profiler",
    "InferenceEngineConfig.tensor_parallel_size": "inference_engine|engine",
    "InferenceEngineConfig.pipeline_parallel_size": "inference_engine|engine",
    "InferenceEngineConfig.data_parallel_size": "inference_engine|engine",
    "SamplingParams.temperature": "sampling|sampling_params|params",
    "SamplingParams.stop": "sampling|sampling_params|params",
    "SamplingParams.logprobs": "sampling|sampling_params|params",
    "GeneratorConfig.batched": "generator|generator_cfg|cfg|config|settings",
    "GeneratorConfig.name": "generator",
    "InferenceEngineConfig.backend": "inference_engine|engine",
    "TrainerConfig.seed": "trainer",
    "TrainerConfig.logger": "trainer",
}
"""Class.field → names of the object it must be taken from, where the field's name alone proves nothing."""

NOT_YET_READ = {f"{cls.__name__}.{name}" for key, cls, name in leaves(SkyRLTrainConfig) if key in NOT_AVAILABLE}
"""Fields of features that are still to come: a run that sets one is refused."""


def reads() -> tuple[set[str], set[tuple[str, str]], list[str]]:
    """Attribute names taken, (object, attribute) pairs, and the strings that name fields, of the code that acts.

    An f-string becomes a pattern: ``f"{role}_num_nodes"`` names ``policy_num_nodes``.
    """
    taken, pairs, patterns = set(), set(), set()
    for path in [*(ROOT / "skyrl_megatron").rglob("*.py"), *(ROOT / "bridges").rglob("*.py")]:
        if path.name in DESCRIBING or (path.parent.name == "config" and path.name not in ACTING):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                taken.add(node.attr)
                owner = getattr(node.value, "attr", None) or getattr(node.value, "id", "")
                pairs.add((owner, node.attr))
            elif isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                text = "".join(re.escape(part) if isinstance(part, str) else r"\w+" for part in parts)
                name = text.rpartition(r"\.")[2]
                if re.fullmatch(r"(\\w\+|\w)+", name) and re.search(r"[a-z]_[a-z]", name):
                    patterns.add(name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"[a-zA-Z_.]+", node.value):
                    patterns.add(re.escape(node.value.rpartition(".")[2]))
    return taken, pairs, sorted(patterns)


def test_every_field_is_read_or_warns():
    taken, pairs, patterns = reads()
    quiet = {(key.rpartition(".")[2]) for key in WITHOUT_EFFECT}
    read, unread = set(), set()
    for _, cls, name in leaves(SkyRLTrainConfig):
        field = f"{cls.__name__}.{name}"
        if cls.__name__ in REFUSED or name in quiet:
            continue
        if field in SECTION:
            found = any((owner, name) in pairs for owner in SECTION[field].split("|"))
        else:
            found = name in taken or any(re.fullmatch(pattern, name) for pattern in patterns)
        (read if found else unread).add(field)
    assert not unread - NOT_YET_READ, f"nothing reads {sorted(unread - NOT_YET_READ)}"


@pytest.mark.parametrize("key", NOT_AVAILABLE)
def test_a_run_refuses_what_is_still_to_come(key):
    values = {bool: True, int: 7, float: 0.5, list: ["x"]}
    section, name = owner_of(SkyRLTrainConfig(), key)
    default = default_of(type(section), name)
    cfg = SkyRLTrainConfig()
    require_available(cfg)
    setattr(owner_of(cfg, key)[0], name, "x" if default is None else values.get(type(default), "x"))
    with pytest.raises(ConfigError, match=f"(?s){key}=.*not available in this version"):
        require_available(cfg)


def test_a_run_refuses_families_that_engines_cannot_be_given(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match="weights of gpt_oss cannot be given to engines"):
        require_available(cfg)
