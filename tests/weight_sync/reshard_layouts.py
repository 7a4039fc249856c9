"""Trainers and engines in any layout, as tables of what they hold and need, and plans carried out on their memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from skyrl_megatron.weight_sync.slices import SourceMap, TargetMap
    from skyrl_megatron.weight_sync.tensors import RowRange, TensorShard

UNTOUCHED = -1.0


def whole_tensors(seed, *, layers, experts, hidden, ffn, vocabulary, fused, tied) -> dict[str, torch.Tensor]:
    """The tensors of a model by HF names; no two elements are equal."""
    import torch

    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= {f"{layer}.norm": (hidden,), f"{layer}.o": (hidden, 16)}
        shapes |= {f"{layer}.q": (16, hidden), f"{layer}.k": (8, hidden), f"{layer}.v": (8, hidden)}
        if fused and experts:
            shapes |= {f"{layer}.gate_up": (experts, 2 * ffn, hidden), f"{layer}.down": (experts, hidden, ffn)}
        for expert in [] if fused and experts else range(max(experts, 1)):
            shapes |= {f"{layer}.{expert}.{name}": (ffn, hidden) for name in ("gate", "up")}
            shapes[f"{layer}.{expert}.down"] = (hidden, ffn)
    shapes |= {"norm": (hidden,)} | ({} if tied else {"head": (vocabulary, hidden)})
    numbers = itertools.count(1 + seed)
    return {
        name: torch.tensor([next(numbers) for _ in range(int(np.prod(shape)))], dtype=torch.float32).view(shape)
        for name, shape in shapes.items()
    }


def _split(length: int, size: int) -> int:
    return -(-length // size)  # the last shards are shorter, or empty: a vocabulary that was padded


def trainer_source_maps(wholes, model, *, tp, etp, ep, pp, dp) -> tuple[list[SourceMap], list[list[torch.Tensor]]]:
    """(What each rank holds, its shards) of a trainer of ``dp`` replicas; q, k and v lie in groups of 4, 2 and 2
    rows in one parameter, gate and up in another, as Megatron keeps them."""
    from skyrl_megatron.weight_sync.slices import SourceMap

    ep = ep if max(model["experts"], 1) % ep == 0 else 1
    held, memory = [], []
    for stage, _, rank in itertools.product(range(pp), range(dp), range(tp * etp * ep)):
        shards, own, place = [], [], 0
        for layer in range(model["layers"]):
            names = [name for name in wholes if name.startswith(f"{layer}.")]
            for name in names if layer % pp == stage else []:
                expert = ".gate" in name or ".up" in name or ".down" in name
                size = etp if expert else tp
                owner = rank % size
                shards += _shards(wholes, name, size, owner, (rank // size % ep, ep) if expert else (0, 1), place)
                own += [owner] * (len(shards) - len(own))
                place += 1
        for name in ("embed",) if stage == 0 else ():
            shards += _shards(wholes, name, tp, rank % tp, (0, 1), place)
            own += [rank % tp] * (len(shards) - len(own))
        for name in ("norm", "head") if stage == pp - 1 else ():
            if name in wholes:
                shards += _shards(wholes, name, tp, rank % tp, (0, 1), place)
                own += [rank % tp] * (len(shards) - len(own))
                place += 1
        held.append(SourceMap.of(shards, own))
        memory.append([shard.local for shard in shards])
    return held, memory


def _shards(wholes, name, size, owner, experts, place) -> list[TensorShard]:
    """The shards that one rank has of a tensor: of each of its experts one, where all experts are one tensor."""
    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron.weight_sync.tensors import TensorShard, as_rows, dtype_name

    whole = wholes[name]
    number, ranks = experts
    meta = TensorMeta(name, dtype_name(whole), tuple(whole.shape), position=place)
    if whole.dim() == 3:
        count = len(whole) // ranks
        chosen = range(number * count, (number + 1) * count)
        return [
            TensorShard(
                TensorMeta(name, meta.dtype, meta.shape, (expert, expert + 1), place),
                *_of_matrix(whole[expert], name, size, owner),
            )
            for expert in chosen
        ]
    parts = name.split(".")
    if len(parts) == 3 and parts[1].isdigit():
        of_layer = max(int(n.split(".")[1]) for n in wholes if n.startswith(f"{parts[0]}.") and n.count(".") == 2) + 1
        if int(parts[1]) // (of_layer // ranks) != number:
            return []
    return [TensorShard(meta, *_of_matrix(as_rows(name, whole), name, size, owner))]


def _of_matrix(rows: torch.Tensor, name: str, size: int, owner: int) -> tuple[torch.Tensor, list[RowRange]]:
    """(The shard, where the rows of all shards belong) of a matrix."""
    import torch

    from skyrl_megatron.weight_sync.tensors import RowRange

    kind = name.split(".")[-1]
    if kind == "norm":
        return rows.clone(), [RowRange(owner, 0, len(rows), 0)]
    if kind in ("o", "down"):
        width = rows.shape[1] // size
        spans = [RowRange(rank, 0, len(rows), 0, 1, rank * width) for rank in range(size)]
        return rows[:, owner * width : (owner + 1) * width].clone(), spans
    if kind in ("q", "k", "v"):  # every other row of the shard belongs to something else
        each = len(rows) // size
        local = torch.full((2 * each + 1, rows.shape[1]), -5.0)
        local[1::2] = rows[owner * each : (owner + 1) * each]
        return local, [RowRange(rank, rank * each, each, 1, 2) for rank in range(size)]
    if kind == "gate_up":
        half, each = len(rows) // 2, len(rows) // 2 // size
        pieces = [rows[half * part + owner * each : half * part + (owner + 1) * each] for part in (0, 1)]
        spans = [RowRange(r, half * part + r * each, each, part * each) for part in (0, 1) for r in range(size)]
        return torch.cat(pieces), spans
    each = _split(len(rows), size)
    spans = [
        RowRange(rank, rank * each, min(each, len(rows) - rank * each), 0)
        for rank in range(size)
        if rank * each < len(rows)
    ]
    local = torch.full((each, rows.shape[1]), -5.0)
    own = rows[owner * each : (owner + 1) * each]
    local[: len(own)] = own
    return local, spans


class _Worker:
    """An engine worker's model while it is loaded: its target map, and what becomes of its parameters."""

    def __init__(self, wholes, numbers, tp, rank) -> None:
        self.wholes, self.numbers, self.tp, self.rank = wholes, numbers, tp, rank
        self.targets: list[tuple[str, str, str, int, int]] = []
        self.memory: list[torch.Tensor] = []
        self.rows: list[tuple[int, ...]] = []

    def parameter(self, *shape: int) -> tuple[int, torch.Tensor]:
        import torch

        self.memory.append(torch.full(shape, UNTOUCHED))
        self.targets.append((f"module {len(self.targets)}", "weight", "float32", self.memory[-1].numel(), -1))
        return len(self.targets) - 1, self.memory[-1]

    def load(self, place: int, target: torch.Tensor, part: torch.Tensor, name: str) -> None:
        """A loader: ``target``, a view of the target ``place``, gets ``part``, a view of a tensor."""
        from skyrl_megatron.weight_sync.slices import strided_copies, width_of

        target.copy_(part)
        where = (part.stride(), part.storage_offset()), (target.stride(), target.storage_offset())
        found = strided_copies(tuple(target.shape), *where, width_of(self.wholes[name].shape))
        self.rows.extend((self.numbers[name], place, *rectangle) for rectangle in found)

    def own(self, name: str, dim: int) -> torch.Tensor:
        each = self.wholes[name].shape[dim] // self.tp
        return self.wholes[name].narrow(dim, self.rank * each, each)

    def vocabulary(self, name: str) -> None:
        each = _split(len(self.wholes[name]), self.tp)
        part = self.wholes[name][self.rank * each : (self.rank + 1) * each]
        place, memory = self.parameter(each, self.wholes[name].shape[1])
        if len(part):
            self.load(place, memory[: len(part)], part, name)

    def attention(self, layer: int) -> None:
        place, memory = self.parameter(self.wholes[f"{layer}.norm"].shape[0])
        self.load(place, memory, self.wholes[f"{layer}.norm"], f"{layer}.norm")
        o = self.own(f"{layer}.o", 1)
        place, memory = self.parameter(*o.shape)
        self.load(place, memory, o, f"{layer}.o")
        parts = [(f"{layer}.{name}", self.own(f"{layer}.{name}", 0)) for name in "qkv"]
        place, memory = self.parameter(sum(len(part) for _, part in parts), parts[0][1].shape[1])
        for (name, part), into in zip(parts, memory.split([len(p) for _, p in parts]), strict=True):
            self.load(place, into, part, name)

    def experts(self, layer: int, model, ep: bool) -> None:
        wholes, count = self.wholes, max(model["experts"], 1)
        ep = ep and count % self.tp == 0
        each = count // self.tp
        chosen = range(self.rank * each, (self.rank + 1) * each) if ep else range(count)
        ffn, hidden = model["ffn"] // (1 if ep else self.tp), model["hidden"]
        first = 0 if ep else self.rank * ffn
        up_place, ups = self.parameter(len(chosen), 2 * ffn, hidden)
        down_place, downs = self.parameter(len(chosen), hidden, ffn)
        for place, expert in enumerate(chosen):
            if f"{layer}.gate_up" in wholes:
                names = [f"{layer}.gate_up", f"{layer}.gate_up", f"{layer}.down"]
                gate, up = wholes[names[0]][expert].chunk(2)
                down = wholes[names[2]][expert]
            else:
                names = [f"{layer}.{expert}.{name}" for name in ("gate", "up", "down")]
                gate, up, down = (wholes[name] for name in names)
            self.load(up_place, ups[place, :ffn], gate[first : first + ffn], names[0])
            self.load(up_place, ups[place, ffn:], up[first : first + ffn], names[1])
            self.load(down_place, downs[place], down[:, first : first + ffn], names[2])


def engine_target_maps(
    wholes, tensors, model, *, tp, ep, engines, pp
) -> tuple[list[TargetMap], list[list[np.ndarray]]]:
    """(The target maps of all workers, what their targets are afterwards)."""
    from skyrl_megatron.weight_sync.slices import TargetMap

    numbers = {meta.name: number for number, meta in enumerate(tensors)}
    target_maps, expected = [], []
    for _, stage, rank in itertools.product(range(engines), range(pp), range(tp)):
        worker = _Worker(wholes, numbers, tp, rank)
        for name in [name for name in ("embed", "head") if name in wholes]:
            worker.vocabulary(name)
        for layer in [layer for layer in range(model["layers"]) if layer % pp == stage]:
            worker.attention(layer)
            worker.experts(layer, model, ep)
        target_maps.append(TargetMap.of(worker.targets, worker.rows))
        expected.append([each.flatten().numpy() for each in worker.memory])
    return target_maps, expected


def carried_out(plan, tensors, memory, target_maps) -> list[list[np.ndarray]]:
    """What the workers' targets are once every copy of the plan was made; each rank goes through its buckets once."""
    found = [
        [np.full(size, UNTOUCHED, np.float32) for *_, size, _ in target_map.targets] for target_map in target_maps
    ]
    position = [0] * len(target_maps)
    for rank, transfers in enumerate(plan.ranks):
        assert len(transfers.buckets) == sum((each.buckets[:, 0] == rank).sum() for each in plan.workers)
    following = [0] * len(plan.ranks)
    left = sum(len(transfers.buckets) for transfers in plan.workers)
    while left:  # a worker takes its next bucket when it is also the next one of the rank that sends it
        before = left
        for worker, transfers in enumerate(plan.workers):
            while position[worker] < len(transfers.buckets):
                rank = int(transfers.buckets[position[worker], 0])
                sends = plan.ranks[rank].buckets[following[rank]]
                if sends[0] != worker:
                    break
                buffer = _filled(plan.ranks[rank], sends, memory[rank])
                _taken(transfers, transfers.buckets[position[worker]], buffer, found[worker])
                position[worker] += 1
                following[rank] += 1
                left -= 1
        assert left < before, "ranks and workers wait for one another in a circle"
    return found


def _filled(transfers, bucket, shards) -> np.ndarray:
    buffer = np.zeros(bucket[1] // 4, np.float32)
    for _, at, rows, columns, shard, first, step, column in transfers.copies[bucket[3] : bucket[4]]:
        chosen = shards[shard][first : first + (rows - 1) * step + 1 : step, column : column + columns]
        buffer[at // 4 : at // 4 + rows * columns] = chosen.reshape(-1).numpy()
    return buffer


def _taken(transfers, bucket, buffer, targets) -> None:
    assert len(buffer) == bucket[1] // 4
    for _, at, rows, columns, target, offset, by_row, by_column in transfers.copies[bucket[3] : bucket[4]]:
        places = (offset + np.arange(rows)[:, None] * by_row + np.arange(columns) * by_column).reshape(-1)
        assert (targets[target][places] == UNTOUCHED).all()
        targets[target][places] = buffer[at // 4 : at // 4 + rows * columns]
