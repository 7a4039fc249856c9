"""Rollouts: experiment, data sets, generator, environments."""

import warnings

QUESTION = [{"role": "user", "content": "What is 7 + 8?"}]


def samples(cfg):
    """Output and requests of a conversation of two turns, and of one that is cut off; the error where there is one."""
    import asyncio

    from skyrl_megatron.errors import SkyRLMegatronError
    from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
    from tests.rollout.scripted import ScriptedEngine, batch_of, generation, say, tokenizer_of

    tokenizer = tokenizer_of("chatml")
    words = tokenizer.encode("#### 15")
    turns = {
        "0": [generation(words), generation([*words, tokenizer.eos_token_id])],
        "1": [generation(words, "length")],
    }
    engine = ScriptedEngine(lambda session: turns[session.partition("_")[0]])
    seed = cfg.trainer.seed if cfg.trainer.deterministic else None
    steps = [[say("wrong, try again.", 0.5), say(reward=1.0, done=True)], [say(reward=1.0, done=True)]]
    batch = batch_of([QUESTION] * 2, [{"steps": each} for each in steps])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            generator = SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, engine, tokenizer, seed=seed)
            output = asyncio.run(generator.generate(batch, disable_tqdm=True))
        except SkyRLMegatronError as error:
            return str(error)
    plain = {key: str(value) for key, value in output.items() if key != "rollout_metrics"}
    return plain, sorted(engine.prompts.items()), engine.sampling, sorted(map(len, engine.calls))


def judgement(cfg):
    """What the run says of agents of which one call in 25 has an answer that was not sampled, and one trajectory in
    five has no sandbox."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_agents.call_counts import CallCounts
    from skyrl_megatron_agents.outcome_counts import OutcomeCounts
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind

    counts = CallCounts()
    for number in range(50):
        counts.sampled(0.0, unmatched=number % 25 == 0)
    try:
        counts.judge(cfg.generator.min_token_in_rate)
        outcomes = OutcomeCounts()
        for number in range(20):
            failed = OutcomeKind.INFRASTRUCTURE if number % 5 == 0 else OutcomeKind.TIMED_OUT
            outcomes.add(Outcome(failed, why="no sandbox"))
        outcomes.judge(cfg.generator.max_infrastructure_share)
    except DataError as error:
        return str(error)
    return "goes on"


def workers(cfg):
    """How many environments work at a time, and for how long."""
    from skyrl_megatron.envs.env_pool import EnvPool

    pool = EnvPool(cfg.environment.skyrl_gym.max_env_workers, cfg.environment.skyrl_gym.env_timeout)
    return sorted((name, value) for name, value in vars(pool).items() if isinstance(value, int | float))


def environments(cfg):
    """What the environments of the package are made with."""
    from skyrl_megatron.envs import make

    gym = cfg.environment.skyrl_gym
    truth = {"reward_spec": {"ground_truth": "1"}, "extra_info": {}, "db_id": "x", "data": "spider"}
    search = make("search", env_config=gym.search, extras=truth)
    judge = make("gsm8k_llm_judge", env_config=gym.llm_as_a_judge, extras=truth)
    sql = make("text2sql", env_config=gym.text2sql, extras=truth)
    (tools,) = search.tool_groups
    return (
        {name: str(value) for name, value in vars(tools).items() if name in vars(gym.search)},
        (judge.url, judge.env_config.model),
        [str(value) for value in vars(sql).values() if "spider" in str(value)],
    )


def experiment(cfg):
    """Data sets, as the experiment opens them, and its generator; the error where it cannot."""
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.errors import SkyRLMegatronError
    from skyrl_megatron.plugins import GENERATORS
    from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator

    class OfTheTests(SkyRLGymGenerator):
        pass

    if GENERATORS.find("tests_generator") is None:
        GENERATORS.register("tests_generator")(OfTheTests)
    try:
        made = BasePPOExp(cfg)
    except SkyRLMegatronError as error:
        return str(error)
    prompts = [
        each and [row[0] for row in map(each.__getitem__, range(len(each)))]
        for each in (made.train_dataset, made.eval_dataset, *made.eval_sets.values())
    ]
    return prompts, type(made.get_generator(cfg, made.tokenizer, None)).__name__


def kept_lengths(cfg):
    """Whether the lengths of prompts are kept for later runs."""
    import os
    import tempfile
    from pathlib import Path
    from unittest.mock import patch

    from skyrl_megatron.entrypoints.experiment import BasePPOExp

    with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, {"SKYRL_MEGATRON_HOME": home}):
        BasePPOExp(cfg)
        return bool(list(Path(home).glob("rows/*/lengths.safetensors")))


def unread_keys(cfg):
    """The prompts of a file with a key that nothing reads; the error where they are refused."""
    from pathlib import Path

    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.errors import SkyRLMegatronError

    file = str(Path(cfg.data.train_data[0]).with_name("named.jsonl"))
    try:
        return len(BasePPOExp(cfg)._dataset("data.train_data", [file]))
    except SkyRLMegatronError as error:
        return str(error)


def order(cfg):
    """The first prompts of the run; the error where it cannot choose them."""
    from skyrl_megatron.data.loader import run_loader
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.errors import SkyRLMegatronError

    try:
        return [entry["uid"] for entry in next(iter(run_loader(cfg, BasePPOExp(cfg).train_dataset)))]
    except SkyRLMegatronError as error:
        return str(error)


def task(cfg):
    """What a task folder gets that asks for very much, and for an image elsewhere; the error where it may not."""
    import tempfile
    from pathlib import Path

    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.gym_generator import registry

    settings = "cpus memory disk processes".split()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.md").write_text("Work.")
        lines = [f"{name} = 1000000000000000" for name in settings]
        text = '[tests]\ncommand = ["true"]\ntimeout_s = 1e12\n[sandbox]\n' + "\n".join(lines)
        config = registry.config_of("task", cfg.environment.skyrl_gym)

        def made():
            return registry.make("task", env_config=config, extras={"task": folder}).task

        Path(folder, "task.toml").write_text(text)
        limited = made()
        Path(folder, "task.toml").write_text(f'{text}\nimage = "/images/a"')
        try:
            image = made().spec.image
        except DataError as error:
            image = str(error).replace(folder, "")
    limits = limited.spec.limits
    return image, [getattr(limits, name) for name in settings], limited.tests_timeout_s


def packages(cfg):
    """What the run says of an environment with an address."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.gym_generator import registry

    try:
        registry.require(["nemo-gym:http://127.0.0.1:1"], cfg.environment.skyrl_gym)
    except DataError as error:
        return str(error)
    return "goes on"


def refusal(cfg):
    """The gate that refuses a group of answers of three tokens."""
    from skyrl_megatron.rollout.gates import Gates

    group = {"rewards": [1.0], "response_ids": [[1, 2, 3]], "loss_masks": [[1, 1, 1]], "rollout_logprobs": None}
    return Gates(cfg.trainer.algorithm.dynamic_sampling.gates).refusal(group, 0)


def agent(cfg):
    """Command and provider of a sandboxed agent, and how many run at a time; the error where there is none."""
    import asyncio

    from skyrl_megatron.errors import SkyRLMegatronError
    from skyrl_megatron.plugins import SANDBOXES
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron_agents.command_agent import AgentTask
    from skyrl_megatron_agents.gateway import Access
    from skyrl_megatron_agents.sandbox_agent import SandboxAgentGenerator
    from tests.rollout.scripted import tokenizer_of

    class Nowhere:
        def problem(self):
            return None

        def reap(self):
            return 0

    if SANDBOXES.find("tests_sandbox") is None:
        SANDBOXES.register("tests_sandbox")(Nowhere)
    made = SandboxAgentGenerator(cfg.generator, cfg.environment.skyrl_gym, None, tokenizer_of("chatml"))
    access = Access("http://127.0.0.1:1/a", "key", "policy")
    task = AgentTask(QUESTION, {}, "gsm8k", TrajectoryID("a", 0), access, 1.0, float)
    try:
        asyncio.run(made.begin())
    except SkyRLMegatronError as error:
        return str(error)
    outcomes = [str(asyncio.run(_late(made, task, too_long))) for too_long in ("", "4097 tokens")]
    return str(made.command_of(task)), type(made.queue.provider).__name__, made.queue._at_once, outcomes


async def _late(generator, task, why):
    """The outcome of a trajectory whose agent reached its time, or the end of its context."""
    from skyrl_megatron_agents.graph import Graph
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind

    class Open:
        failure = agents_failure = ""
        too_long, graph = why, Graph(calls=[None])

    async def agent(_):
        return Outcome(OutcomeKind.TIMED_OUT)

    generator.agent = agent
    return await generator._outcome(task, Open)


def agent_limits(cfg):
    """What the agent of a trajectory may use, and the parser of its thinking."""
    from skyrl_megatron_agents.agent_generator import AgentGenerator
    from tests.rollout.scripted import tokenizer_of

    made = AgentGenerator(cfg.generator, cfg.environment.skyrl_gym, None, tokenizer_of("chatml"))
    return made.limits(), made.thinking_parser(), made._may_set()
