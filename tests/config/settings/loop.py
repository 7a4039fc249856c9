"""The trainer's loop: what it does in which order, with ranks and engines that only take notes."""

import asyncio
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from skyrl_megatron.errors import AlgorithmError


class Prompts:
    """Twelve rows without an environment of their own."""

    def __len__(self):
        return 12

    def __getitem__(self, item):
        return item

    def roles_of(self, uids):
        return ["first" if int(uid) % 2 else "second" for uid in uids]

    def collate_fn(self, items):
        row = {
            "prompt": [{"role": "user", "content": "1+2"}],
            "env_class": None,
            "env_extras": {"reward_spec": {"ground_truth": "3"}},
        }
        return [{**row, "uid": str(item)} for item in items]


class Silent:
    """A tracker."""

    def __init__(self, cfg):
        pass

    def say(self, text):
        pass

    log = open = finish = lambda self, *args, **kwargs: None


def trainer_of(cfg, cls=None):
    """A real trainer that was never started: the experiment's, or one of the class."""
    from skyrl_megatron.entrypoints.experiment import BasePPOExp

    return (cls or partial(BasePPOExp.get_trainer, SimpleNamespace(cfg=cfg)))(
        cfg=cfg,
        tracker=Silent(cfg),
        tokenizer=None,
        train_dataset=Prompts(),
        inference_engine_client=None,
        generator=None,
        colocate_pg=None,
        eval_dataset=Prompts(),
    )


def output_of(rewards):
    """A generator's output of two-token responses."""
    rows = len(rewards)
    return {
        "prompt_token_ids": [[1, 2]] * rows,
        "response_ids": [[3, 4]] * rows,
        "rewards": rewards,
        "loss_masks": [[1, 1]] * rows,
        "stop_reasons": ["stop"] * rows,
        "rollout_logprobs": [[-1.0, -1.0]] * rows,
        "rollout_metrics": {},
    }


def plan(cfg):
    """Everything that the loop does, from the evaluation before it to the last step."""
    from skyrl_megatron.trainer.ppo import RayPPOTrainer

    notes = []

    class Noting(RayPPOTrainer):
        def collect_experience(self):
            prompts = next(self.rollouts.prompts)
            generator_input, uids = self.prepare_generator_input(prompts, "train")
            notes.append(("generate", uids, generator_input["env_classes"][0]))
            self.metrics["reward/avg_raw_reward"] = 0.5
            return _batch_of(uids)

        def eval(self):
            notes.append(("eval", self.global_step))
            self.metrics |= {"eval/all/avg_score": 0.1 * self.global_step}
            return {}

        def save_checkpoints(self):
            notes.append(("checkpoint", self.global_step))
            self.checkpoints.saved_step = self.global_step

        def log_step(self):
            notes.append(("step", self.global_step))

        fwd_logprobs_values_reward = lambda self, batch: batch  # noqa: E731
        compute_advantages_and_returns = lambda self, batch: batch  # noqa: E731
        apply_reward_kl_penalty = lambda self, batch: batch  # noqa: E731
        keep_samples = lambda self, batch: None  # noqa: E731
        begin_training = sync_weights = lambda self: None

    trainer = trainer_of(cfg, Noting)
    trainer.checkpoints = SimpleNamespace(saved_step=None, mark_best=lambda *best: notes.append(("best", *best)))
    trainer.roles["policy"] = SimpleNamespace(
        name="policy",
        ranks=[],
        dispatch=lambda batch, rows: batch.select(rows),
        train_mini_batch=lambda part, more_follow: notes.append(("update", part.uids)) or {"skipped": 0.0},
        export_hf=lambda folder, described: notes.append(("export", folder)),
        offload=lambda *parts: None,
        score_speed=dict,
    )
    trainer.roles["ref"] = SimpleNamespace(
        name="ref",
        ranks=[],
        offload=lambda: None,
        copy_weights=lambda source: notes.append(("ref", source.name)),
        score_speed=dict,
    )
    trainer.before_training()
    trainer.train_steps()
    return notes, trainer.updates


def heals(cfg):
    """What becomes of a policy that loses a rank at steps 1, 2, 4 and 5."""
    from skyrl_megatron.errors import RankLostError

    notes, lost = [], []

    def replace(ranks):
        notes.append(("replace", lost.pop()))
        return ranks

    def work():
        step = trainer.global_step
        if ("work", step) not in notes:
            lost.append(step)
        notes.append(("work", step))
        if lost:
            raise RankLostError("policy rank 0: the process died", "policy")

    trainer = trainer_of(cfg)
    trainer.renew_weight_sync = lambda: None
    trainer.roles["policy"] = SimpleNamespace(
        name="policy",
        group=SimpleNamespace(role="policy", names=["policy rank 0"], lost=lambda *, stopped: lost and [0]),
        offload=lambda: None,
        replace=replace,
        rebuild=lambda: None,
        keep_state=lambda: notes.append("keep") or 0,
        peer_holders=lambda new: None if cfg.trainer.healing.copies == "none" else {},
        roll_back=lambda holders: notes.append("back"),
    )
    trainer.recovery.begin()
    type(trainer).can_rewind, whole = property(lambda self: False), type(trainer).can_rewind
    try:
        for step in (1, 2, 4, 5):
            trainer.global_step = step
            trainer.recovery.run(work)
    except RankLostError:
        notes.append("ended")
    finally:
        type(trainer).can_rewind = whole
    return notes


def scores(cfg):
    """What the policy is asked for before the update."""
    notes = []

    class Policy:
        def compute_logprobs(self, batch, phase):
            return notes.append("log-probs") or batch.response_mask.float()

        def logprobs_and_routes(self, batch, phase):
            notes.append("log-probs and routes")
            return batch.response_mask.float(), []

    trainer = trainer_of(cfg)
    trainer.roles["policy"] = Policy()
    batch = _batch_of(list("abcd"))
    batch.rollout_logprobs = batch.response_mask.float()
    trainer.fwd_logprobs_values_reward(batch)
    return notes


def _batch_of(uids):
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.data.splitting import PROMPT_UIDS

    batch = collate([[1, 2]] * len(uids), [[3, 4]] * len(uids), uids=list(uids), rewards=[1.0] * len(uids))
    batch.metadata[PROMPT_UIDS] = list(uids)
    return batch


def gap(cfg):
    """What a step allows engine and trainer to differ by, and what a larger gap does."""
    from skyrl_megatron.algorithms.metrics import MISMATCH
    from skyrl_megatron.config.rules.exact_rules import rollout_gap_limit
    from skyrl_megatron.trainer.step_batch import check_rollout_gap

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_rollout_gap({f"policy/{MISMATCH}_max": 9.0}, cfg, 1)
        except AlgorithmError:
            return rollout_gap_limit(cfg), "ends"
    return rollout_gap_limit(cfg), len(caught)


def oversampling(cfg):
    """How many prompts a step starts, and how long they stay open."""
    groups = getattr(trainer_of(cfg).rollouts, "groups", None)
    return groups and (groups.most, groups.bound)


def stream(cfg):
    """What a stream of rollouts keeps to; None where nothing runs ahead."""
    stream = getattr(trainer_of(cfg).rollouts, "stream", None)
    return stream and stream.limits


def rollouts(cfg):
    """Where the groups of a run are kept."""
    from skyrl_megatron.config.resolve import rollouts_folder

    return rollouts_folder(cfg)


def adapts(cfg):
    """Whether the stream looks at the places of engines."""
    stream = getattr(trainer_of(cfg).rollouts, "stream", None)
    return stream and stream.concurrency.free is not None


def keeps(cfg):
    """Whether a group stays on disk once a checkpoint has it."""
    import tempfile

    from skyrl_megatron.sources.store import DurableGroups

    with tempfile.TemporaryDirectory() as folder:
        cfg.trainer.ckpt_path = folder
        store = DurableGroups(cfg, lambda number: 0, fresh=False).store
        store.close()
    return store.keep_consumed


def replays(cfg):
    """Where the groups come from that a run trains on: refused where there are none."""
    from skyrl_megatron.errors import ConfigError

    try:
        return type(trainer_of(cfg).rollouts.stream)
    except ConfigError as error:
        return error.problems


def resumes(cfg):
    """What the checkpointer is asked to load."""
    asked = []
    trainer = trainer_of(cfg)
    trainer.checkpoints = SimpleNamespace(load=lambda mode, path: asked.append((mode, path)))
    trainer.load_checkpoints()
    return asked


def continues_others(cfg):
    """Whether what was computed from other data is continued."""
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.identity import Part, refuse_other

    try:
        refuse_other("trainer.ckpt_path", "ckpt", {"data": Part("a", "1")}, cfg, {"data": Part("b", "2")})
    except ConfigError as error:
        return str(error)
    return "continued"


def checkpointer(cfg):
    """Where checkpoints go, how many are kept, whether training waits."""
    from skyrl_megatron.trainer.checkpoints import run_checkpointer

    made = run_checkpointer(cfg, {})
    return str(made.store.root), made.store.keep, made.store.hub_commits, made._asynchronous, made._timeout_s


def dumps(cfg):
    """Whether the tensors of a batch are written, and where to."""
    trainer_of(cfg).convert_to_training_input(output_of([[0.0, 1.0]] * 8), [uid for uid in "abcd" for _ in range(2)])
    return files_below(cfg.trainer.export_path)


def exports(cfg):
    """Who else is told of numbers and spans."""
    from skyrl_megatron.trainer.recorders import RecordedRun
    from skyrl_megatron.trainer.tracking import Tracking
    from skyrl_megatron_observe.report_recorder import ReportRecorder

    tracking = Tracking(cfg)
    collector = ReportRecorder(RecordedRun(cfg, None, 1, None, tracking, dict)).collector
    tracking.open(total_steps=1)
    kinds = [type(sink).__name__ for sink in tracking.sinks]
    tracking.finish()
    return kinds, collector and collector.address


def looks(cfg):
    """Steps of which samples are kept, and how many."""
    from skyrl_megatron_observe.report_recorder import ReportRecorder

    recorders = trainer_of(cfg).recorders
    [samples] = [recorder.samples for recorder in recorders if isinstance(recorder, ReportRecorder)]
    return [step for step in range(1, 4000) if samples.due(step)], samples.rows


def files_below(folder):
    return sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())


def evaluation(cfg):
    """Requests of an evaluation of twelve prompts, and the files that it leaves."""
    from skyrl_megatron.trainer.evaluate import evaluate
    from tests.rollout.scripted import ScriptedEngine, generation, generator_of, tokenizer_of

    tokenizer = tokenizer_of("chatml")
    answer = generation([*tokenizer.encode("#### 15"), tokenizer.eos_token_id])
    engine = ScriptedEngine([answer])
    generator = generator_of("chatml", engine, tokenizer=tokenizer, max_turns=1, batched=True)
    asyncio.run(evaluate(cfg, Prompts(), generator, tokenizer, 0))
    return [len(call) for call in engine.calls], engine.sampling[0], files_below(cfg.trainer.export_path)


def restarts(cfg):
    """How often an engine is restarted."""
    from skyrl_megatron.workers.engines import health_monitor

    return health_monitor(cfg, None, None).restarts_per_hour


def synchronizer(cfg):
    """How weights reach the engines, how often they are probed, and how long that may take."""
    from skyrl_megatron.workers.policy_rank import weight_synchronizer

    made = weight_synchronizer(cfg, SimpleNamespace(group=SimpleNamespace(actors=[])), None, dtype="float32")
    probe = made.probe_interval, made.probe_limit
    return made.options, probe, made.deadline_s, made.phase_s, made.shared_gpus, made.reshard
