"""The weight sync: every engine gets the trainer's weights, is verified, and only then generates with them.

    pause all engines and check their processes → connect (once, and after engines changed) → start → send ‖ receive →
    compare the checksums of every worker → finish → trainer and engines score the same tokens → publish the version →
    resume

Ranks and engines are called concurrently (``sync_calls.py``). An engine that fails is restarted and the sync is
repeated for all engines. It is dropped instead if it fails again while others are left, or if it is a remote engine.
Nothing is delivered from the new weights before the version is published. A failed sync leaves the engines paused.

If engines hold the base model and receive adapters, they store each new adapter separately from the one that serves
until all engines are verified. After a failed sync they continue to serve the old adapters. Adapters that have not
changed are not sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron.errors import EngineError, WeightSyncError
from skyrl_megatron.inference.client import SILENT_S
from skyrl_megatron.inference.engine_pool import EnginePool, EngineSlot, same_failure
from skyrl_megatron.inference.protocol import INITIAL_VERSION, InferenceEngine
from skyrl_megatron.plugins import TRANSPORTS
from skyrl_megatron.weight_sync import DEFAULT_BUCKET_BYTES
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.probe import (
    EPSILON,
    is_due,
    limit_of,
    logprob_diff,
    probe_tokens,
)
from skyrl_megatron.weight_sync.tensors import SentAdapters, check_metadata
from skyrl_megatron.weight_sync.transport import default_transport
from skyrl_megatron.workers.sync_calls import (
    AttemptFailed,
    EnginesDisagree,
    EnginesLost,
    ReshardPlanner,
    SyncCalls,
    SyncReport,
    TrainerRank,
    WorkerPlan,
    compare_buckets,
    compare_checksums,
    connect_workers,
)

if TYPE_CHECKING:
    from skyrl_megatron.types import Part

log = logging.getLogger(__name__)
NEARLY = 0.95
"""Smaller buckets are chosen if they reach this fraction of the best bandwidth."""
RESTARTS = 2
"""Restarts of one engine in one sync."""
ENGINE_FRACTION = 0.8
"""The longest wait of a rank for engines, as a fraction of a phase. Ranks wait longer for one another, so that a rank
that waits for the failed one does not time out first."""


class NoEngineLeft(WeightSyncError):
    """No engine is alive to receive the weights."""


class WeightSynchronizer:
    """Sends the weights of ``ranks`` to the engines of a pool. It only orders the calls.

    ``hf_config``: of the model, to check that all weights are sent. ``dtype``: of the engines' weights.
    ``deadline_s``: for one sync, restarts included; ``phase_s``: for each phase, and the longest wait of a rank or
    worker. ``probe_interval``: syncs between two probes (``weight_sync_probe_interval``). ``probe_limit``: nats; None
    for what rounding explains. ``bucket_sizes``: bytes, ascending. If ranks and workers send point to point over a
    network, the first sync measures them and chooses one; otherwise the last one is used. ``shared_gpus``: trainer and
    engines share GPUs, and engines sleep while the trainer works. ``exchange``: the number of ranks on a node, if
    ranks exchange the weights for the workers on their GPUs (``weight_sync/point_to_point.py``); else 0. ``adapters``:
    those that are sent alone, to engines that hold the base model; None to send all weights. ``reshard``: send each
    worker only its own slices, if that can be planned (``sync_calls.py``). ``draft``: the ranks train the multi-token
    prediction layer, which is sent as well. ``look``, ``end_waiting``: see :class:`SyncCalls`.
    """

    def __init__(
        self,
        pool: EnginePool,
        ranks: Sequence[TrainerRank],
        *,
        hf_config: Mapping[str, Any],
        dtype: str,
        probe_interval: int = 1,
        probe_limit: float | None = None,
        transport: str | None = None,
        bucket_sizes: Sequence[int] = (DEFAULT_BUCKET_BYTES,),
        deadline_s: float = 1800.0,
        phase_s: float = 600.0,
        shared_gpus: bool = False,
        exchange: int = 0,
        adapters: SentAdapters | None = None,
        reshard: bool = False,
        draft: bool = False,
        experts_move: bool = False,
        look: Callable[[], str] = lambda: "",
        end_waiting: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.pool, self.calls = pool, SyncCalls(ranks, phase_s, look, end_waiting)
        self.hf_config, self.dtype = hf_config, dtype
        self.probe_interval, self.probe_limit = probe_interval, probe_limit
        self.options: dict[str, Any] = {
            "transport": transport or default_transport(),
            "bucket_bytes": bucket_sizes[-1],
            "timeout_s": ENGINE_FRACTION * phase_s,
        }
        self.deadline_s, self.phase_s, self.shared_gpus = deadline_s, phase_s, shared_gpus
        self.adapters, self.draft, self.exchange = adapters, draft, exchange
        self.adapter_names = () if adapters is None else tuple(adapters.names)
        self.experts_move = experts_move
        transports = (*TRANSPORTS.built_in, *TRANSPORTS.reserved)
        self.reshard = reshard and self.options["transport"] in transports
        self.planner = ReshardPlanner(self.calls, bucket_sizes[-1])
        over_network = not exchange and self.options["transport"] in TRANSPORTS.built_in
        self._unmeasured = tuple(bucket_sizes) if over_network and len(bucket_sizes) > 1 else ()
        """Bucket sizes that the next connection measures."""
        self.versions: dict[str, str] = {}
        """Adapter → the last version that changed its weights, including the current sync."""
        self.syncs = 0
        self.training = True
        """Whether the trainer may have changed the weights since the last sync."""
        self._metadata: list[list[TensorMeta]] = []
        self.plan: WorkerPlan | None = None
        """The reshard plan of the last sync; None if every worker got all buckets."""
        self._connected: list[InferenceEngine] = []  # engines of the current process groups
        self._changed: set[str] = set(self.adapter_names)  # adapters that not all engines have
        self._whole: list[InferenceEngine] = []  # engines that have all other adapters

    async def sync(self, version: str, changed: Collection[str] | None = None) -> SyncReport:
        """Send the trainer's weights to every engine as ``version``. Requests in flight are frozen during the sync.

        ``changed``: the adapters that were trained since the last sync; None for all.

        Raises WeightSyncError if no engine could be verified or a trainer rank does not answer. Then no engine
        generates, the version is not published, and the trainer's state is unchanged. Errors of trainer ranks are
        raised unchanged.
        """
        ends = time.monotonic() + self.deadline_s
        while True:
            await self.pool.until_some_are_there(ends - time.monotonic())
            async with self.pool.changing:
                self.calls.ends = ends
                self._changed |= set(self.adapter_names if changed is None else changed)
                self.versions |= dict.fromkeys(self._changed, version)
                try:
                    report = await self._until_verified(version)
                except NoEngineLeft:
                    if self.pool.newcomers and time.monotonic() < ends:
                        continue
                    raise
                slots = self.pool.alive()
                self._changed, self._whole = set(), [slot.engine for slot in slots]
                for slot in slots:
                    slot.version = version
                self.pool.publish(version)
                with report.timed("resume"):
                    await self.calls.on_engines(slots, "resume", lambda engine: engine.resume())
                self.syncs += 1
                self.training = False
                return report

    async def _until_verified(self, version: str) -> SyncReport:
        """Attempt the sync until the engines that are left are verified; restart or drop those that fail."""
        failures: list[str] = []
        restarts: dict[EngineSlot, list[str]] = {}
        repeated = False
        await self._offload("gradients", "optimizer")
        while True:
            if self.pool.dead():  # a restarted engine needs its GPUs as empty as at the start of the run
                await self._offload("weights")
            await self._restart_dead(restarts, failures)
            slots = self.pool.alive()
            if not slots:
                raise NoEngineLeft(self._none_left(version, failures))
            report = SyncReport(version, 0, len(slots), failures=failures)
            try:
                await self._update(slots, version, report)
                return report
            except EnginesDisagree as error:
                why, lost = str(error), error.causes
                if len(lost) == len(slots) and not all(slot.joined and not slot.verified for slot in slots):
                    await self._leave_update(slots)
                    raise WeightSyncError(
                        f"{self._unpublished(version)}: {next(iter(lost.values()))}. All bytes arrived unchanged, so "
                        "trainer and engine interpret the weights differently"
                    ) from error
            except EnginesLost as error:
                why, lost = str(error), error.causes
            except AttemptFailed as error:
                if repeated:
                    await self._leave_update(slots)
                    raise WeightSyncError(f"{self._unpublished(version)}: {error}") from error
                why, lost = str(error), {}
                repeated = True
            except BaseException:
                await self._leave_update(slots)
                raise
            log.warning("version %s: %s", version, why)
            if not any(same_failure(why, failure) for failure in failures):
                failures.append(why)
            for slot, cause in lost.items():
                await self.pool.mark_dead(slot, cause)
            await self._leave_update([slot for slot in slots if slot not in lost])

    async def _update(self, slots: list[EngineSlot], version: str, report: SyncReport) -> None:
        """Run all phases for these engines. Raises EnginesLost, AttemptFailed, or the error of a trainer rank."""
        with report.timed("pause"):
            for slot in slots:
                self.pool.pause(slot)
            await self.calls.on_engines(slots, "pause", _pause, SILENT_S)
            if self.shared_gpus:
                await self.calls.on_engines(slots, "wake weights", lambda engine: engine.wake(["weights"]))
        with report.timed("connect"):
            await self._connect(slots)
        report.adapters = names = self._adapters_to_send(slots)
        chosen = () if names is None or names == ("",) else (names,)
        connected = [sender for sender in self._metadata if sender]
        plan = self.plan if self.plan is None or names is None else self.plan.of(names)
        if plan is not None:  # workers know all except which adapters are sent
            connected = [] if names is None else [list(plan.tensors)]
        metadata = (
            connected
            if names is None
            else [[meta for meta in sender if meta.adapter in names] for sender in connected]
        )
        report.nbytes = sum(meta.nbytes for sender in metadata for meta in sender) if plan is None else plan.nbytes
        with report.timed("start"):
            await self.calls.on_engines(slots, "start", lambda engine: engine.start_update())
        with report.timed("transfer"):
            received, sent = await self.calls.together(
                slots,
                "transfer",
                lambda engine: engine.receive_weights(metadata),
                lambda _, rank: rank.send_weights(*chosen),
            )
        if plan is not None:
            compare_checksums(plan, slots, received, sent)
        else:
            compare_buckets(
                slots, received, [sums for sums, sender in zip(sent, self._metadata, strict=True) if sender]
            )
        versions = () if names is None else ({name: self.versions[name] for name in names},)
        with report.timed("finish"):
            await self.calls.on_engines(slots, "finish", lambda engine: engine.finish_update(version, *versions))
        with report.timed("probe"):
            await self._probe(slots, report)
        if names is not None:
            with report.timed("switch"):
                await self.calls.on_engines(slots, "switch", lambda engine: engine.set_version(version))

    # ------------------------------------------------------------------ training and single engines
    async def begin_training(self) -> None:
        """Wait until no sync is running and engines on the same GPUs sleep.

        The trainer may then use its ranks and change its weights. Until the next sync :meth:`sync_engine` raises.
        """
        async with self.pool.changing:
            self.training = True
            if self.shared_gpus:
                await self.pool.sleep(self.phase_s)

    async def replace_ranks(self, ranks: Sequence[TrainerRank]) -> None:
        """Use ``ranks`` from now on, some of which replace lost ones. The next sync connects again."""
        async with self.pool.changing:
            self.calls.ranks, self._connected, self.training = list(ranks), [], True

    async def sync_engine(self, slot: EngineSlot) -> None:
        """Send the published version to an engine that restarted or joined. Possible until :meth:`begin_training`,
        while the trainer still has these weights. The caller holds the pool's lock. Raises WeightSyncError. Errors of
        trainer ranks are raised unchanged; the engine can then be synced again."""
        if self.training:
            raise WeightSyncError(
                f"the trainer no longer has version {self.pool.published}; the engine gets the next one"
            )
        self.calls.ends = time.monotonic() + self.deadline_s
        version = self.pool.published
        try:
            await self._update([slot], version, SyncReport(version, 0, 1))
            await self.calls.on_engines([slot], "resume", lambda engine: engine.resume())
        except (EnginesLost, AttemptFailed) as error:
            causes = error.causes if isinstance(error, EnginesLost) else {}
            await self.pool.mark_dead(slot, causes.get(slot, str(error)))
            raise WeightSyncError(str(error)) from error
        except Exception:
            await self._leave_update([slot])
            raise
        self._whole.append(slot.engine)
        self.pool.serve(slot, version)

    # ------------------------------------------------------------------ the phases
    def _adapters_to_send(self, slots: Sequence[EngineSlot]) -> tuple[str, ...] | None:
        """Return the adapters that these engines need: those that changed, or all if one of the engines is new."""
        if self.adapters is None:
            return None
        know = all(slot.engine in self._whole for slot in slots)
        return tuple(name for name in self.adapter_names if name in self._changed or not know)

    async def _connect(self, slots: list[EngineSlot]) -> None:
        engines = [slot.engine for slot in slots]
        if engines == self._connected and not await self._weights_moved():
            return
        self._connected = []
        self._metadata = await self.calls.on_ranks("metadata", lambda rank: rank.weight_metadata())
        if self.adapters is None:
            check_metadata(self._metadata, self.hf_config, draft=self.draft)
        else:
            self.adapters.check(self._metadata)
        self.plan = await self._planned(slots) if self.reshard else None
        if self.plan is not None:
            rates = await connect_workers(self.calls, slots, self.plan, self._reshard_options, self._unmeasured)
            if rates and self._choose_bucket_size(rates):
                self.plan = await self._planned(slots)
                assert self.plan is not None, "there was a plan for other buckets"
                await connect_workers(self.calls, slots, self.plan, self._reshard_options)
        else:
            await self._connect_all(slots)
        self._connected = engines

    async def _weights_moved(self) -> bool:
        """Return whether ranks have other experts than when they were connected."""
        return self.experts_move and any(await self.calls.on_ranks("metadata", lambda rank: rank.weights_moved()))

    def _choose_bucket_size(self, rates: Mapping[int, float]) -> bool:
        """Choose the smallest buckets that are nearly as fast as the fastest; return whether the plan has others."""
        self._unmeasured = ()
        fast = NEARLY * max(rates.values())
        chosen = next(size for size, rate in rates.items() if rate >= fast)
        measured = ", ".join(f"{size >> 20} MiB: {rate / 1e9:.2f} GB/s" for size, rate in rates.items())
        log.info("weights are sent in buckets of %d MiB (%s)", chosen >> 20, measured)
        planned, self.planner.bucket_bytes = self.planner.bucket_bytes, chosen
        return planned != chosen

    @property
    def _reshard_options(self) -> dict[str, Any]:
        return self.options | {"bucket_bytes": self.planner.bucket_bytes}

    async def _planned(self, slots: list[EngineSlot]) -> WorkerPlan | None:
        """Return a reshard plan; None, and a line in the log, if none exists. Raises WeightSyncError if none exists
        and ranks exchange weights."""
        planned = await (
            self.planner.plan(slots, self._rank_on_gpu, self.exchange) if self.exchange else self.planner.plan(slots)
        )
        if isinstance(planned, str):
            if self.exchange:
                raise WeightSyncError(
                    f"no reshard plan is possible: {planned}. An engine worker only opens memory of the rank on "
                    "its own GPU, and NCCL allows one process per GPU: set trainer.placement.colocate_all=false"
                )
            log.info("every engine worker gets all weights, not only its own slices: %s", planned)
            return None
        return planned

    def _rank_on_gpu(self, slot: EngineSlot, number: int) -> int:
        """Return the rank on the GPU of an engine's worker: the engines take the policy's GPUs in order, one for each
        worker (``workers/placement.py``)."""
        return self.pool.slots.index(slot) * (len(self.calls.ranks) // len(self.pool.slots)) + number

    async def _connect_all(self, slots: list[EngineSlot]) -> None:
        """Connect every worker to the process group of every rank that sends."""
        sends = [bool(sender) for sender in self._metadata]
        workers = await self.calls.on_engines(slots, "connect", lambda engine: engine.worker_count())
        addresses = await self.calls.on_ranks("connect", lambda rank: rank.listen_for_engines())
        senders = [address for address, sending in zip(addresses, sends, strict=True) if sending]
        offsets = {id(slot.engine): 1 + sum(workers[:number]) for number, slot in enumerate(slots)}
        world = 1 + sum(workers)

        async def open_group(number: int, rank: TrainerRank) -> None:
            if sends[number]:
                await rank.connect_engines(world - 1, self.options["timeout_s"])

        await self.calls.together(
            slots,
            "connect",
            lambda engine: engine.connect_weights(senders, offsets[id(engine)], world, **self.options),
            open_group,
        )

    async def _probe(self, slots: list[EngineSlot], report: SyncReport) -> None:
        """Score the same tokens with the trainer and the engines, if the probe is due.

        Frozen requests continue during the probe. Their tokens are delivered only if the version is published.
        """
        tokens = probe_tokens(int(self.hf_config["vocab_size"]), report.version)
        due = is_due(self.syncs, self.probe_interval) or not all(slot.verified for slot in slots)
        names = (("",) if report.adapters is None else report.adapters) if due else ()
        expected = {name: await self._expected(tokens, name) for name in names}
        await self._offload("weights")
        if self.shared_gpus:
            await self.calls.on_engines(slots, "wake cache", lambda engine: engine.wake(["kv_cache"]))
        if not expected:
            return
        await self.calls.on_engines(slots, "probe", lambda engine: engine.resume())
        scored = {name: await self.calls.on_engines(slots, "probe", _scores(tokens, name)) for name in names}
        await self.calls.on_engines(slots, "probe", lambda engine: engine.pause("keep"))
        wrong: dict[EngineSlot, str] = {}
        for name, engines in scored.items():
            trainer, limit = expected[name]
            for slot, logprobs in zip(slots, engines, strict=True):
                difference = logprob_diff(trainer, logprobs)
                report.logprob_diffs[f"{slot.name}, {name}" if name else slot.name] = difference
                if not difference.within(limit) and slot not in wrong:
                    wrong[slot] = (
                        f"log-probs of {len(tokens)} tokens{f' with adapter {name}' if name else ''} differ from the "
                        f"trainer's by up to {difference.largest:.2e}, on average {difference.mean:.2e}; the limit on "
                        f"average is {limit:.2g} in {self.dtype} (weight_sync_probe_limit sets another)"
                    )
        for slot in slots:
            slot.verified = slot.verified or slot not in wrong
        if wrong:
            raise EnginesDisagree("probe", wrong)

    async def _expected(self, tokens: list[int], adapter: str) -> tuple[list[float], float]:
        """Return the trainer's scores, and the largest mean difference that an engine's may have."""
        named = {"adapter": adapter} if adapter else {}

        async def score(perturbation: float) -> list[float]:
            scored = await self.calls.on_ranks(
                "probe", lambda rank: rank.score(tokens, perturbation=perturbation, **named)
            )
            return next(logprobs for logprobs in scored if logprobs is not None)

        trainer = await score(perturbation=0.0)
        perturbed = await score(perturbation=EPSILON[self.dtype])
        explained = limit_of(self.dtype, logprob_diff(trainer, perturbed))
        return trainer, explained if self.probe_limit is None else self.probe_limit

    async def _offload(self, *parts: Part) -> None:
        """Offload parts of the trainer from shared GPUs."""
        if self.shared_gpus:
            await self.calls.on_ranks("offload", lambda rank: rank.offload(parts))

    # ------------------------------------------------------------------ failures
    async def _restart_dead(self, restarts: dict[EngineSlot, list[str]], failures: list[str]) -> None:
        """Restart dead engines within the deadline. Drop an engine that does not start, fails the same way again, or
        fails too often. ``restarts``: engine → the cause of each of its restarts in this sync."""
        for slot in self.pool.dead():
            causes = restarts.setdefault(slot, [])
            try:
                if any(same_failure(slot.why, cause) for cause in causes):
                    raise EngineError("it failed the same way after a restart")
                if len(causes) >= RESTARTS:
                    raise EngineError(f"failed again after {RESTARTS} restarts")
                causes.append(slot.why)
                async with asyncio.timeout(max(self.calls.ends - time.monotonic(), 0.0)):
                    await self.pool.restart(slot)
            except (EngineError, TimeoutError) as error:
                why = str(error) or f"not restarted within deadline_s={self.deadline_s:g}"
                await self.pool.drop(slot, why)
                failures.append(f"{slot.name} is dropped: {why}")
                log.error(failures[-1])

    def _none_left(self, version: str, failures: Sequence[str]) -> str:
        text = f"version {version} is not published, no engine is left: {'; '.join(failures)}"
        if not self.syncs:
            return f"{text}. Nothing was trained: fix the cause and start again"
        return f"{text}. The trainer's state is intact: the same command continues from its last checkpoint"

    async def _leave_update(self, slots: Sequence[EngineSlot]) -> None:
        """Abort a sync on these engines. The next sync creates new process groups. Engines that still have the
        published adapters resume."""
        self._connected = []
        for slot in slots:
            try:
                await self.calls.within(slot.engine.abort_update())
                if self._old_serves and await self.calls.within(slot.engine.version()) == self.pool.published:
                    await self.calls.within(slot.engine.resume())
                    self.pool.serve(slot, self.pool.published)
            except (EngineError, WeightSyncError) as error:
                await self.pool.mark_dead(slot, str(error))

    @property
    def _old_serves(self) -> bool:
        """Whether engines can serve after a failed sync: the base model is unchanged and they are not asleep."""
        return self.adapters is not None and self.pool.published != INITIAL_VERSION and not self.pool.asleep

    def _unpublished(self, version: str) -> str:
        rest = (
            f"engines continue to serve version {self.pool.published}" if self._old_serves else "no engine generates"
        )
        return f"version {version} is not published, {rest}"


async def _pause(engine: InferenceEngine) -> None:
    """Pause, and check that no process has stopped, as the next phases have long timeouts."""
    await engine.pause("keep")
    await engine.health()


def _scores(tokens: list[int], adapter: str) -> Callable[[InferenceEngine], Awaitable[list[float]]]:
    return lambda engine: engine.score(tokens, adapter) if adapter else engine.score(tokens)
