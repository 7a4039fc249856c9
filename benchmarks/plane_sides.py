"""The ways of carrying a step's batch that ``control_plane.py`` compares: what the driver does, and what a rank does.

A step: the batch of the sampled rows, log-probs of the policy and of the reference, advantages (GRPO), and the
mini-batches of an optimizer. Ranks fetch what they are given and compute nothing: log-probs are a function of the
token, so that sums over the trained tokens, which the ranks of an update return, show that each row arrived whole and
with its own values.

**Ours is the class** :class:`Ours`: the project's functions, called as the trainer and its workers call them. Nothing
else of the benchmark knows them.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import ray

LINEAR, ATTENTION = 1.5e10, 4.6e5
"""FLOPs of a token, and of a pair of tokens, of a model of 7B."""
OLD, REFERENCE = 7_919, 104_729
"""What tells the log-probs of policy and reference apart."""


@dataclass(frozen=True)
class Shape:
    """The batch of a step, and what a step does with it."""

    rows: int
    limit: int
    """Tokens of the longest answer, which one row has."""
    mean: float
    """Mean tokens of an answer; with the same mean, any limit gives the same number of tokens."""
    sigma: float
    """Of the log-normal lengths of the answers, before the limit cuts them."""
    prompt: int
    layers: int
    """Layers with recorded routes; 0: none."""
    topk: int
    replicas: int
    mini_batches: int
    reference: bool
    samples: int
    """Rows of a prompt."""

    def answers(self) -> np.ndarray:
        """Tokens of each answer, [rows] int64."""
        draw = np.random.default_rng(0)
        lengths = np.exp(draw.normal(0.0, self.sigma, self.rows)) * self.mean
        wanted = self.rows * self.mean - self.limit
        for _ in range(50):
            lengths = np.clip(lengths, 1, self.limit)
            lengths[1:] *= max(wanted, self.rows) / lengths[1:].sum()
        whole = np.clip(lengths, 1, self.limit).astype(np.int64)
        whole[0] = self.limit
        return whole

    @property
    def positions(self) -> int:
        """Places of a tensor that is padded to the longest row."""
        return self.rows * (self.limit + self.prompt)

    def route_bytes(self) -> int:
        """Bytes of the routes of all tokens."""
        return int((self.answers() + self.prompt).sum()) * self.layers * self.topk

    def payload(self) -> int:
        """Bytes of the columns that an update reads, without padding and in the narrowest type that is exact: ids in
        4 bytes, masks in bits, log-probs (of the engine, the policy, the reference) and advantages in 4 bytes."""
        answers = self.answers()
        columns = 3 + self.reference
        return int(4 * (answers + self.prompt).sum() + (4 * columns + 1 / 8) * answers.sum())

    def dense_payload(self) -> int:
        """Bytes of the tokens that exist in the types and columns of 062ad5f4."""
        answers = self.answers()
        columns = 7 + self.reference
        return int(9 * (answers + self.prompt).sum() + 4 * columns * answers.sum())


@dataclass(frozen=True)
class Inputs:
    """What the driver has after sampling."""

    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    loss_masks: list[np.ndarray]
    logprobs: list[np.ndarray]
    rewards: list[float]
    uids: list[str]

    @classmethod
    def of(cls, shape: Shape) -> Inputs:
        draw = np.random.default_rng(1)
        answers = shape.answers().tolist()
        responses = [draw.integers(0, 150_000, length, dtype=np.int32) for length in answers]
        masks = [np.ones(length, bool) for length in answers]
        for mask in masks:
            mask[len(mask) // 4 : len(mask) // 3] = False  # what a tool wrote
        return cls(
            [draw.integers(0, 150_000, shape.prompt, dtype=np.int32) for _ in answers],
            responses,
            masks,
            [logprobs_of(response, 31) for response in responses],
            draw.random(shape.rows).tolist(),
            [f"prompt-{row // shape.samples}" for row in range(shape.rows)],
        )


def logprobs_of(tokens: np.ndarray, salt: int) -> np.ndarray:
    """A number for each token, in the shape of ``tokens``, float32."""
    return -((tokens.astype(np.int64) * salt) % 1000).astype(np.float32) / 1000


# ---------------------------------------------------------------------- counting
class Transfers:
    """Counts what this process puts into the object store and gets out of it."""

    def __init__(self) -> None:
        self.put: dict[str, int] = {}
        """Size of each object by its id."""
        self.got: list[str] = []
        self.sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._put, self._get = ray.put, ray.get
        ray.put, ray.get = self._counted_put, self._counted_get

    def _counted_put(self, value: Any, **options: Any) -> Any:
        reference = self._put(value, **options)
        with self._lock:
            self.put[reference.hex()] = _size(reference, value)
        return reference

    def _counted_get(self, references: Any, **options: Any) -> Any:
        values = self._get(references, **options)
        several = isinstance(references, Sequence)
        for reference, value in zip(references, values, strict=True) if several else [(references, values)]:
            with self._lock:
                self.got.append(reference.hex())
                self.sizes[reference.hex()] = _size(reference, value)
        return values

    def taken(self) -> tuple[list[str], dict[str, int], dict[str, int]]:
        """Objects got, sizes of the objects put, and of those got; counts anew from now on."""
        answer = self.got, self.put, self.sizes
        self.got, self.put, self.sizes = [], {}, {}
        return answer


def _size(reference: Any, value: Any) -> int:
    """Bytes of an object in the store. Of one that another process owns, those of the arrays in ``value``."""
    located = ray.experimental.get_local_object_locations([reference])
    if size := int((located.get(reference) or {}).get("object_size") or 0):
        return size
    buffers: list[Any] = []
    if not isinstance(value, dict | list | tuple | np.ndarray):
        return 0  # inlined numbers, and objects of verl, whose size the driver knows
    pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return sum(buffer.raw().nbytes for buffer in buffers)


def _watch(actor: Any) -> None:
    global _transfers
    _transfers = Transfers()


def _taken(actor: Any) -> tuple[list[str], dict[str, int], dict[str, int]]:
    assert _transfers is not None
    return _transfers.taken()


_transfers: Transfers | None = None
"""Those of an actor's process."""


def created_bytes() -> int:
    """Bytes of all objects that the store of this node has ever held."""
    from ray._private import internal_api

    node = ray.nodes()[0]
    stats = internal_api.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
    return int(stats.cumulative_created_bytes)


# ---------------------------------------------------------------------- processes
class Rank:
    """An actor that is every rank of a role in turn: fetches what its replica is given."""

    def __init__(self, side: str) -> None:
        self.side = SIDES[side]()

    def run(self, method: str, given: list[Any], *arguments: Any) -> Any:
        """``given``: references, which this process fetches itself."""
        return getattr(self.side, method)(*given, *arguments)


class Engine:
    """An actor that sampled the rows, and has the routes of their tokens."""

    PARTS = 8

    def __init__(self, shape: Shape) -> None:
        draw = np.random.default_rng(2)
        totals = (shape.answers() + shape.prompt).tolist()
        self._routes = [draw.integers(0, 128, (n, shape.layers, shape.topk), dtype=np.uint8) for n in totals]

    def routes(self, part: int) -> list[np.ndarray]:
        """The routes of a part of the rows, as the answer of a call."""
        size = -(-len(self._routes) // self.PARTS)
        return self._routes[part * size : (part + 1) * size]

    def routes_apart(self, part: int) -> Any:
        """The same, each as a result of its own."""
        routes = self.routes(part)
        return tuple(routes) if len(routes) > 1 else routes[0]


@dataclass
class Plane:
    """The driver's view of the other processes, and its clock."""

    shape: Shape
    rank: Any
    engine: Any
    """None without routes."""
    watched: list[Any] = field(default_factory=list)
    """Actors whose transfers count."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Processor time of each phase."""

    def watch(self, actor: Any) -> None:
        """Count what an actor puts and gets from now on. A side calls this for actors that it starts."""
        if actor not in self.watched:
            ray.get(actor.__ray_call__.remote(_watch))
            self.watched.append(actor)

    def transferred(self) -> list[tuple[list[str], dict[str, int], dict[str, int]]]:
        """What each watched actor transferred since the last call, as :meth:`Transfers.taken` says it."""
        taken: list[Any] = ray.get([actor.__ray_call__.remote(_taken) for actor in self.watched])
        return taken

    def call(self, method: str, given: Sequence[Any], *arguments: Any) -> list[Any]:
        """The results of a method of the side on each replica. ``given``: the reference of each."""
        results: list[Any] = ray.get([self.rank.run.remote(method, [one], *arguments) for one in given])
        return results

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began

    def routes(self) -> list[np.ndarray] | None:
        """The routes of all rows in the driver; None if none are recorded."""
        if not self.shape.layers:
            return None
        parts = ray.get([self.engine.routes.remote(part) for part in range(Engine.PARTS)])
        return [routes for part in parts for routes in part]


def _flops(lengths: np.ndarray) -> np.ndarray:
    lengths = lengths.astype(np.float64)
    flops: np.ndarray = LINEAR * lengths + ATTENTION * lengths * (lengths + 1) / 2
    return flops


def _sums(mask: Any, advantages: Any, old: Any, reference: Any, routed: int = 0) -> np.ndarray:
    """What an update returns, [5] float64: trained tokens, and sums over them; and the tokens with routes."""
    taken = mask > 0
    sums = [0.0 if x is None else float(x[taken].double().sum()) for x in (advantages.abs(), old, reference)]
    return np.array([float(mask.sum()), *sums, float(routed)])


# ---------------------------------------------------------------------- ours
class Ours:
    """The functions of this tree. A rewrite of the batch changes this class, and nothing else of the benchmark."""

    name: ClassVar[str] = "ours"

    def step(self, inputs: Inputs, plane: Plane) -> np.ndarray:
        """The driver's part of a step, as ``trainer/ppo.py`` does it. Returns the sum of the ranks' answers."""
        from skyrl_megatron.algorithms.advantages import batch_advantages
        from skyrl_megatron.algorithms.masked import finite_samples
        from skyrl_megatron.data.batch import collate
        from skyrl_megatron.data.splitting import (
            MINI_BATCH_PROMPTS,
            mini_batches,
            parts_with_trained_tokens,
            rows_with_trained_tokens,
            trained_rows,
        )
        from skyrl_megatron.trainer.step_batch import advantage_metrics, logprob_diff_metrics, missing_signal

        shape = plane.shape
        with plane.phase("batch"):
            batch = collate(
                inputs.prompts,
                inputs.responses,
                uids=inputs.uids,
                rewards=inputs.rewards,
                loss_masks=inputs.loss_masks,
                rollout_logprobs=inputs.logprobs,
                rollout_routes=self._routes(plane),
            )
            prompts = -(-shape.rows // shape.samples // shape.mini_batches)
            batch.metadata[MINI_BATCH_PROMPTS] = prompts
            finite_samples(batch)
        if shape.reference:
            with plane.phase("reference"):
                batch.ref_logprobs = self._scores(batch, plane, REFERENCE)
        with plane.phase("log-probs"):
            batch.old_logprobs = self._scores(batch, plane, OLD)
            logprob_diff_metrics(batch)
        with plane.phase("advantages"):
            batch.advantages, batch.returns = batch_advantages(batch, "grpo", None)
            advantage_metrics(batch)
            missing_signal(batch)
        with plane.phase("update"):
            trained = trained_rows(batch)
            parts = parts_with_trained_tokens(mini_batches(batch, prompts), trained)
            sharded = [
                self._dispatched(batch, shape.replicas, rows_with_trained_tokens(rows, trained)) for rows in parts
            ]
            answers = [answer for part in sharded for answer in plane.call("train", part.shares)]
        return np.sum(answers, axis=0)

    @staticmethod
    def _routes(plane: Plane) -> list[Any] | None:
        """References to the routes of all rows, as ``workers/engines.py`` makes them; None if none are recorded."""
        from skyrl_megatron.types import StoredArray
        from skyrl_megatron.workers.dispatch import RayArray

        shape = plane.shape
        references: list[Any] = []
        if not shape.layers:
            return None
        totals = (shape.answers() + shape.prompt).tolist()
        size = -(-len(totals) // Engine.PARTS)
        for part in range(Engine.PARTS):
            count = len(totals[part * size : (part + 1) * size])
            answer = plane.engine.routes_apart.options(num_returns=count).remote(part)
            references += answer if count > 1 else [answer]
        rest = (shape.layers, shape.topk)
        return [
            StoredArray([(RayArray(reference), 0, n)], rest, np.dtype(np.uint8))
            for reference, n in zip(references, totals, strict=True)
        ]

    @staticmethod
    def _dispatched(batch: Any, replicas: int, rows: np.ndarray | None = None) -> Any:
        from skyrl_megatron.runtime.flops import ModelFlops
        from skyrl_megatron.workers.dispatch import dispatch

        flops = ModelFlops(LINEAR, ATTENTION, 0.0, 0)
        return dispatch(batch, replicas, flops, rows, trains=rows is not None)

    def _scores(self, batch: Any, plane: Plane, salt: int) -> Any:
        """Log-probs of a pass over the batch, collected from the replicas."""
        from skyrl_megatron.workers.dispatch import RankInfo

        replicas = plane.shape.replicas
        ranks = [RankInfo(number, replicas, True, 0, "") for number in range(replicas)]
        sharded = self._dispatched(batch, replicas)
        results = plane.call("score", [argument for (argument,) in sharded.arguments(ranks)], salt)
        return sharded.collect(ranks, results)

    def score(self, given: Any, salt: int) -> np.ndarray:
        """A rank: log-probs of its rows, in the form that its worker returns."""
        batch = given.batch()
        logprobs: np.ndarray = logprobs_of(batch.response_tokens().numpy(), salt) * batch.response_mask.numpy()
        return logprobs

    def train(self, given: Any) -> np.ndarray:
        """A rank: the sums of :func:`_sums` over the rows of its mini-batch."""
        batch = given.batch()
        routed = sum(len(routes) for routes in batch.rollout_routes if routes is not None)
        return _sums(batch.loss_mask, batch.advantages, batch.old_logprobs, batch.ref_logprobs, routed)


# ---------------------------------------------------------------------- today's path
class Today:
    """062ad5f4: dense tensors, put for each call."""

    name: ClassVar[str] = "today"

    def step(self, inputs: Inputs, plane: Plane) -> np.ndarray:
        import dense_batch as dense

        shape = plane.shape
        with plane.phase("batch"):
            batch = dense.collate(
                inputs.prompts,
                inputs.responses,
                uids=inputs.uids,
                rewards=inputs.rewards,
                loss_masks=inputs.loss_masks,
                rollout_logprobs=inputs.logprobs,
                rollout_routes=plane.routes(),
            )
            dense.finite_samples(batch)
        if shape.reference:
            with plane.phase("reference"):
                batch.ref_logprobs = self._scores(batch, plane, REFERENCE)
        with plane.phase("log-probs"):
            batch.old_logprobs = self._scores(batch, plane, OLD)
            dense.logprob_diff_metrics(batch)
        with plane.phase("advantages"):
            assert batch.rewards is not None
            batch.advantages, batch.returns = dense.compute_advantages_and_returns(
                batch.rewards, batch.response_mask, batch.loss_mask, batch.uids
            )
            dense.advantage_metrics(batch)
            dense.has_signal(batch)
        with plane.phase("update"):
            prompts = -(-shape.rows // shape.samples // shape.mini_batches)
            parts = dense.parts_with_trained_tokens(dense.mini_batches(batch, prompts))
            parts = [dense.rows_with_trained_tokens(part) for part in parts]
            sharded = [dense.dispatch(part, shape.replicas, _flops) for part in parts]
            answers = [answer for part in sharded for answer in plane.call("train", part.chunks)]
        return np.sum(answers, axis=0)

    @staticmethod
    def _scores(batch: Any, plane: Plane, salt: int) -> Any:
        import dense_batch as dense

        sharded = dense.dispatch(batch, plane.shape.replicas, _flops)
        return sharded.collect(plane.call("score", sharded.chunks, salt))

    def score(self, given: Any, salt: int) -> np.ndarray:
        import dense_batch as dense

        batch = dense.from_arrays(ray.get(given))
        width = batch.response_mask.shape[1]
        tokens = batch.sequences[:, batch.sequences.shape[1] - width :]
        logprobs: np.ndarray = logprobs_of(tokens.numpy(), salt) * batch.response_mask.numpy()
        return logprobs

    def train(self, given: Any) -> np.ndarray:
        import dense_batch as dense

        batch = dense.from_arrays(ray.get(given))
        routed = sum(len(routes) for routes in batch.rollout_routes if routes is not None)
        return _sums(batch.loss_mask, batch.advantages, batch.old_logprobs, batch.ref_logprobs, routed)


# ---------------------------------------------------------------------- verl
class Verl:
    """verl 0.9.1's ``DataProto``: balanced, cut into a chunk per replica, and put for each pass; an update takes the
    whole batch, and ranks iterate over its mini-batches."""

    name: ClassVar[str] = "verl"

    def step(self, inputs: Inputs, plane: Plane) -> np.ndarray:
        from verl import DataProto
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

        shape = plane.shape
        with plane.phase("batch"):
            tensors = self._padded(inputs, shape)
            uids = {"uid": np.array(inputs.uids, dtype=object)}
            batch = DataProto.from_dict(tensors=tensors, non_tensors=uids)
            self._balance(batch, shape.replicas)
        with plane.phase("log-probs"):
            batch = batch.union(self._scores(batch, plane, OLD, "old_log_probs"))
        if shape.reference:
            with plane.phase("reference"):
                batch = batch.union(self._scores(batch, plane, REFERENCE, "ref_log_prob"))
        with plane.phase("advantages"):
            batch.batch["token_level_scores"] = batch.batch["rm_scores"]
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            batch.batch["advantages"], batch.batch["returns"] = compute_grpo_outcome_advantage(
                token_level_rewards=batch.batch["token_level_rewards"],
                response_mask=batch.batch["response_mask"],
                index=batch.non_tensor_batch["uid"],
            )
        with plane.phase("update"):
            answers = plane.call("train", self._put(batch, shape.replicas), shape.mini_batches)
        return np.sum(answers, axis=0)

    @staticmethod
    def _padded(inputs: Inputs, shape: Shape) -> dict[str, Any]:
        """Prompts padded at the left, answers at the right up to the limit, as its agent loop pads them."""
        import torch

        rows, prompt, limit = shape.rows, shape.prompt, shape.limit
        ids = torch.zeros(rows, prompt + limit, dtype=torch.int64)
        attention, mask = torch.zeros_like(ids), torch.zeros(rows, limit, dtype=torch.int64)
        logprobs, rewards = torch.zeros(rows, limit), torch.zeros(rows, limit)
        for row, (question, answer) in enumerate(zip(inputs.prompts, inputs.responses, strict=True)):
            n = len(answer)
            ids[row, prompt - len(question) : prompt] = torch.from_numpy(question)
            ids[row, prompt : prompt + n] = torch.from_numpy(answer)
            attention[row, prompt - len(question) : prompt + n] = 1
            mask[row, :n] = torch.from_numpy(inputs.loss_masks[row])
            logprobs[row, :n] = torch.from_numpy(inputs.logprobs[row])
            rewards[row, n - 1] = inputs.rewards[row]
        return {
            "prompts": ids[:, :prompt].contiguous(),
            "responses": ids[:, prompt:].contiguous(),
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": mask,
            "rollout_log_probs": logprobs,
            "rm_scores": rewards,
        }

    @staticmethod
    def _balance(batch: Any, replicas: int) -> None:
        """``RayPPOTrainer._balance_batch``."""
        import torch
        from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

        work = calculate_workload(batch.batch["attention_mask"].sum(-1))
        parts = get_seqlen_balanced_partitions(work, k_partitions=replicas, equal_size=True)
        for number, part in enumerate(parts):
            part.sort(key=lambda row: (work[row], row))
            parts[number] = part[::2] + part[1::2][::-1]
        batch.reorder(torch.tensor([row for part in parts for row in part]))

    @staticmethod
    def _put(batch: Any, replicas: int) -> list[Any]:
        """``dispatch_nd_compute_dataproto``."""
        from verl.protocol import BatchData
        from verl.utils.ray_utils import parallel_put

        references: list[Any] = parallel_put(BatchData(batch).chunk(chunks=replicas), max_workers=2)
        return references

    def _scores(self, batch: Any, plane: Plane, salt: int, name: str) -> Any:
        from verl.protocol import BatchData

        results = plane.call("score", self._put(batch, plane.shape.replicas), salt, name)
        return BatchData(results).concat()

    def score(self, given: Any, salt: int, name: str) -> Any:
        import torch
        from verl import DataProto

        batch = ray.get(given).batch
        width = batch["responses"].shape[1]
        answered = batch["attention_mask"][:, -width:]
        logprobs = torch.from_numpy(logprobs_of(batch["responses"].numpy(), salt)) * answered
        return DataProto.from_dict(tensors={name: logprobs.float()})

    def train(self, given: Any, mini_batches: int) -> np.ndarray:
        batch = ray.get(given)
        total = np.zeros(5)
        for part in batch.make_iterator(mini_batch_size=max(len(batch) // mini_batches, 1), epochs=1):
            read = part.batch
            reference = read["ref_log_prob"] if "ref_log_prob" in read.keys() else None
            total += _sums(read["response_mask"], read["advantages"], read["old_log_probs"], reference)
        return total


class VerlUnpadded(Verl):
    """verl 0.9.1's trainer: a ``DataProto`` in the driver, for each pass a ``TensorDict`` with unpadded ids."""

    name: ClassVar[str] = "verl_unpadded"

    @staticmethod
    def _put(batch: Any, replicas: int) -> list[Any]:
        return Verl._put(VerlUnpadded._tensordict(batch), replicas)

    @staticmethod
    def _tensordict(batch: Any) -> Any:
        from verl.workers.utils.padding import left_right_2_no_padding

        return left_right_2_no_padding(batch.to_tensordict())

    def _scores(self, batch: Any, plane: Plane, salt: int, name: str) -> Any:
        """``_compute_old_log_prob`` and ``_compute_ref_log_prob``."""
        from verl import DataProto
        from verl.protocol import BatchData
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        unpadded = self._tensordict(batch)
        output = BatchData(plane.call("score", Verl._put(unpadded, plane.shape.replicas), salt, name)).concat()
        logprobs = no_padding_2_padding(tu.get(output, "log_probs"), unpadded)
        return DataProto.from_tensordict(tu.get_tensordict({name: logprobs.float()}))

    def score(self, given: Any, salt: int, name: str) -> Any:
        import torch
        from verl.utils import tensordict_utils as tu

        ids = ray.get(given)["input_ids"]
        values = torch.from_numpy(logprobs_of(ids.values().numpy(), salt)).roll(-1)  # a place predicts the next token
        return tu.get_tensordict({"log_probs": torch.nested.nested_tensor_from_jagged(values, offsets=ids.offsets())})

    def train(self, given: Any, mini_batches: int) -> np.ndarray:
        read = ray.get(given)
        reference = read["ref_log_prob"] if "ref_log_prob" in read.keys() else None
        return _sums(read["response_mask"], read["advantages"], read["old_log_probs"], reference)


SIDES: dict[str, type[Any]] = {side.name: side for side in (Today, Ours, Verl, VerlUnpadded)}
DENSE_BYTES = {"today": 90, "verl": 215, "verl_unpadded": 240}
"""Peak bytes of the driver for each place of the padded tensors, a little above what was measured: they decide
whether a size is tried."""
